"""Advice on frequent errors, below their tracebacks; texts.py has the advice."""
