"""How a folder of C++ and CUDA operators is built, found, checked and loaded. `python -m common.ops FOLDER` builds.

A leaf: nothing else in `common` needs it. Building needs no PyTorch in the process, so nothing here imports it early.
"""

from common.ops.load import Implementation, load

__all__ = ["Implementation", "load"]
