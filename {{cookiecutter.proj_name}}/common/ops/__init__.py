"""How a folder of C++ and CUDA operators is built, found, checked and loaded. `python -m common.ops FOLDER` builds.

A leaf: nothing else in `common` needs it. Building imports nothing but Python's own library, so that the answer "up to
date" takes no seconds.
"""
