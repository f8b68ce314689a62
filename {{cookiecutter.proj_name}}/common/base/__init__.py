"""Errors, atomic files, processes: used by every package. Imports no other package of ours, nor PyTorch."""
