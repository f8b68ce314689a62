"""Errors, atomic files, processes, nested values: used by every package. Imports no other package of `common`."""
