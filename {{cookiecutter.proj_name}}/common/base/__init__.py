"""Errors, atomic files, processes: what every room needs. Imports nothing of ours, and not PyTorch."""
