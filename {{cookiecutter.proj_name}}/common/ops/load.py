"""The library of a folder of operators: its path, and whether it is current. `load` loads it."""

import hashlib
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from loguru import logger

from common.config import shown_path

# -fno-math-errno: a function that sets errno cannot be vectorized.
FLAGS = ["-O3", "-std=c++20", "-fPIC", "-Wall", "-fno-math-errno"]
HOW_TO_BUILD = "sh scripts/install_ops.sh"
NOTHING = "nothing is built"


@dataclass(frozen=True)
class Implementation:
    """The implementation that runs when an operator is called. `str()` of it is for the log."""

    library: Path | None = None
    architectures: tuple[str, ...] = ()  # of GPUs, such as 8.0 or 9.0+PTX; empty: CPU only
    reason: str = ""

    def __str__(self) -> str:
        if self.library is None:
            return f"Python reference ({self.reason}; {HOW_TO_BUILD} builds the C++ and CUDA kernels)"
        gpu = "Python reference"
        if self.architectures:
            gpu = f"CUDA for {', '.join(self.architectures)}"
        return f"C++ on the CPU, {gpu} on a GPU ({shown_path(self.library)})"


def build_folder(folder: Path) -> Path:
    """Return the folder of the built library: `build` in `folder`, or the one that OPS_BUILD_DIR names."""
    return Path(os.environ.get("OPS_BUILD_DIR") or folder / "build")


def library_path(folder: Path, architectures: Sequence[str]) -> Path:
    """Return the path of a library built now for these GPUs: its name changes with all that it is made from."""
    versions = [torch.__version__, platform.machine(), FLAGS]
    made_from = hashlib.sha256(repr(versions).encode())
    for file in sorted((folder / "src").glob("*")):
        made_from.update(file.name.encode())
        made_from.update(file.read_bytes())
    parts = [library_name(folder), made_from.hexdigest()[:8], *architectures]
    return build_folder(folder) / f"{'-'.join(parts)}.so"


def library_name(folder: Path) -> str:
    """Return how the names of the folder's libraries begin."""
    return f"{folder.parent.name}_{folder.name}"


def find(folder: Path) -> Implementation:
    """Return the library of `folder` if it is current; else the reason why there is none."""
    current = library_path(folder, []).stem
    for library in build_folder(folder).glob(f"{current}*.so"):
        architectures = library.stem.removeprefix(current).split("-")[1:]
        return Implementation(library, tuple(architectures))
    if any(build_folder(folder).glob(f"{library_name(folder)}-*.so")):
        return Implementation(reason="the build is out of date: a source, PyTorch, the machine or a flag has changed")
    return Implementation(reason=NOTHING)


@cache
def load(folder: Path) -> Implementation:
    """Load the library of the operators in `folder`, once; without a current one, their Python references run.

    A library that is out of date is never loaded: a warning names the command to build.
    """
    build = find(folder)
    if build.library is None:
        if build.reason != NOTHING:
            logger.warning("{}: {}", shown_path(folder), build)
        return build
    try:
        torch.ops.load_library(build.library)
    except OSError as error:
        logger.warning("{} cannot be loaded; the Python reference runs: {}", shown_path(build.library), error)
        return Implementation(reason="the built library cannot be loaded")
    return build
