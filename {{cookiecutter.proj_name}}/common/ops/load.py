"""The library of a folder of operators: its path, what it was built from, whether it is current. `load` loads it."""

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from loguru import logger

from common.config import shown_path

CPP = {".cpp", ".h"}
CUDA = {".cu", ".cuh"}
# -fno-math-errno: a function that sets errno cannot be vectorized.
FLAGS = ["-O3", "-std=c++20", "-fPIC", "-Wall", "-fno-math-errno"]
HOW_TO_BUILD = "sh scripts/install_ops.sh"
NOTHING = "nothing is built"


@dataclass(frozen=True)
class Record:
    """The inputs of a library's build; saved as JSON beside it."""

    torch: str  # version of PyTorch
    machine: str  # such as x86_64
    architectures: list[str]  # of GPUs, such as 8.0 or 9.0+PTX; empty: CPU only
    sources: dict[str, str]  # file -> checksum
    flags: list[str]


@dataclass(frozen=True)
class Implementation:
    """The implementation that runs when an operator is called. `str()` of it is for the log."""

    library: Path | None = None
    architectures: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        if self.library is None:
            return f"Python reference ({self.reason}; {HOW_TO_BUILD} builds the C++ and CUDA kernels)"
        gpu = "Python reference"
        if self.architectures:
            gpu = f"CUDA for {', '.join(self.architectures)}"
        return f"C++ on the CPU, {gpu} on a GPU ({shown_path(self.library)})"


def record_now(folder: Path, architectures: Sequence[str]) -> Record:
    """Return the record of a library built now for these GPUs."""
    wanted = CPP | CUDA if architectures else CPP
    sources = {}
    for file in sorted((folder / "src").glob("*")):
        if file.suffix in wanted:
            sources[file.name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return Record(
        str(torch.__version__),
        platform.machine(),
        list(architectures),
        sources,
        FLAGS,
    )


def build_folder(folder: Path) -> Path:
    """Return the folder of the built library: `build` in `folder`, or the one that OPS_BUILD_DIR names."""
    return Path(os.environ.get("OPS_BUILD_DIR") or folder / "build")


def library_path(folder: Path, record: Record) -> Path:
    """Return the path of the library with this record: libraries with different records have different names."""
    inputs = json.dumps(asdict(record), sort_keys=True).encode()
    return build_folder(folder) / f"{folder.parent.name}_{folder.name}-{hashlib.sha256(inputs).hexdigest()[:8]}.so"


def find(folder: Path) -> Implementation:
    """Return the library of `folder` if it is current; else the reason why there is none."""
    records = build_folder(folder).glob(f"{folder.parent.name}_{folder.name}-*.json")
    try:
        newest = max(records, key=os.path.getmtime)
        built = Record(**json.loads(newest.read_text()))
    except (ValueError, TypeError):  # there is none, or it is of another version of this module
        return Implementation(reason=NOTHING)
    now = record_now(folder, built.architectures)
    library = library_path(folder, now)
    if built == now and library.is_file():
        return Implementation(library, tuple(built.architectures))
    return Implementation(reason=f"the build is out of date ({_difference(built, now)})")


@cache
def load(folder: Path) -> Implementation:
    """Load the library of the operators in `folder`, once; without a current one, their Python references run.

    A library that is out of date is never loaded: a warning names what has changed, and the command to build.
    """
    build = find(folder)
    if build.library is not None:
        try:
            torch.ops.load_library(build.library)
        except OSError as error:
            text = "{}: {} cannot be loaded; the Python reference runs: {}"
            logger.warning(text, shown_path(folder), build.library.name, error)
            return Implementation(reason="the built library cannot be loaded")
    elif build.reason != NOTHING:
        logger.warning(
            "{}: {}; the Python reference runs. To build: {}", shown_path(folder), build.reason, HOW_TO_BUILD
        )
    return build


def _difference(old: Record, new: Record) -> str:
    if old.torch != new.torch:
        return f"made for PyTorch {old.torch}, and this is {new.torch}"
    if (old.machine, old.flags) != (new.machine, new.flags):
        return "made for another kind of machine, or with other compiler flags"
    names = []
    for name in sorted({*old.sources, *new.sources}):
        if old.sources.get(name) != new.sources.get(name):
            names.append(name)
    if not names:
        return "its library is missing"
    return f"{', '.join(names)} changed since"
