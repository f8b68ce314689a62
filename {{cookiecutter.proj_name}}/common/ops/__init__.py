"""Finds, checks and loads the built library of a folder of C++ and CUDA operators. `support.ops` builds it.

Nothing else in `common` depends on it.
"""
