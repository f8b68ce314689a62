"""Builds a folder of C++ and CUDA operators: `python -m support.ops FOLDER`, as scripts/install_ops.sh does.

`common.ops` finds, checks and loads what is built. Building imports the standard library only, so an up-to-date build
is confirmed at once.
"""
