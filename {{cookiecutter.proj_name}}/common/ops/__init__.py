"""Builds, finds, checks and loads a folder of C++ and CUDA operators. `python -m common.ops FOLDER` builds one.

Nothing else in `common` depends on it. Building imports the standard library only, so an up-to-date build is
confirmed at once.
"""
