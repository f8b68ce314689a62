"""Tests of the parts: a folder for each."""
