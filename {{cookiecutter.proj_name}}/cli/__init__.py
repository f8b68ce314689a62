"""Shared code of train.py, evaluate.py and the tools: the command line, and the first and last lines of a run."""
