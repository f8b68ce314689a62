"""The compiled library of a folder of operators: its path, what it was built from, and whether it is current."""

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

CPP, CUDA = {".cpp", ".h"}, {".cu", ".cuh"}
# -fno-math-errno: a function that sets errno cannot be vectorized.
FLAGS = ["-O3", "-std=c++20", "-fPIC", "-Wall", "-fno-math-errno"]


@dataclass(frozen=True)
class Record:
    """The inputs of a library's build; saved as JSON beside it."""

    torch: str  # version of PyTorch
    machine: str  # such as x86_64
    architectures: list[str]  # of GPUs, such as 8.0 or 9.0+PTX; empty: CPU only
    sources: dict[str, str]  # file -> checksum
    flags: list[str]

    @property
    def name(self) -> str:
        """Eight hexadecimal digits that change with any input of the build."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]


def record_now(folder: Path, architectures: list[str]) -> Record:
    """The record of a library built now for these GPUs."""
    wanted = CPP | CUDA if architectures else CPP
    files = [file for file in sorted((folder / "src").glob("*")) if file.suffix in wanted]
    sources = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return Record(torch_version(), platform.machine(), architectures, sources, FLAGS)


def build_folder(folder: Path) -> Path:
    """The folder of the built library: `build` in `folder`, or the one that OPS_BUILD_DIR names."""
    return Path(os.environ.get("OPS_BUILD_DIR") or folder / "build")


def library_path(folder: Path, record: Record) -> Path:
    """The path of the library with this record: libraries with different records have different names."""
    return build_folder(folder) / f"{folder.parent.name}_{folder.name}-{record.name}.so"


def find(folder: Path) -> tuple[Path, Record] | str:
    """The library of `folder` with its record if it is current; else the reason why there is none, in words."""
    records = build_folder(folder).glob(f"{folder.parent.name}_{folder.name}-*.json")
    try:
        built = Record(**json.loads(max(records, key=os.path.getmtime).read_text()))
    except (ValueError, TypeError):  # there is none, or it is of another version of this module
        return "nothing is built"
    now = record_now(folder, built.architectures)
    library = library_path(folder, now)
    if built == now and library.is_file():
        return library, built
    return f"the build is out of date ({_difference(built, now)})"


def _difference(old: Record, new: Record) -> str:
    if old.torch != new.torch:
        return f"made for PyTorch {old.torch}, and this is {new.torch}"
    if (old.machine, old.flags) != (new.machine, new.flags):
        return "made for another kind of machine, or with other compiler flags"
    names = sorted(name for name in {*old.sources, *new.sources} if old.sources.get(name) != new.sources.get(name))
    return f"{', '.join(names)} changed since" if names else "its library is missing"


def torch_folder() -> Path:
    """Where PyTorch is installed."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None  # common/__init__.py has checked that it is installed
    return Path(spec.origin).parent


def torch_version() -> str:
    """PyTorch's version, such as 2.13.0+cpu, without the two seconds that importing it takes."""
    return importlib.metadata.version("torch")
