"""Sentences of different lengths: what they mean, and which word comes next."""
