"""Builds, finds, checks and loads a folder of C++ and CUDA operators. `python -m common.ops FOLDER` builds one.

Nothing else in `common` depends on it.
"""
