"""Errors, atomic files: what every room needs. Imports nothing of ours, and not PyTorch."""
