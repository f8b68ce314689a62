"""Builds the emulated accelerator, once for each version of torch and of its sources.  python build.py"""

import fcntl
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Beside the packages that it belongs to, so that copies of the repository (make mutate) need not build it again.
CACHE = Path(tempfile.gettempdir() if sys.prefix == sys.base_prefix else sys.prefix) / "emulated_accelerator"
TORCH = "2.13"  # it needs headers that torch may change in any release: try a new one, then change this
_ENTRY = "[torch.backends]\nemu = emulated_device:load\n"


class CannotBuild(Exception):
    """The emulator cannot be built here; the message says why."""


def built(torch_version: str) -> Path:
    """Return the folder with the compiled emulator; it and `HERE` belong in PYTHONPATH. Builds it if it is missing.

    Raises:
        CannotBuild: another version of torch, or no compiler.
    """
    if not torch_version.startswith(f"{TORCH}."):
        raise CannotBuild(f"the emulated accelerator is made for torch {TORCH}, and this is {torch_version}")
    sources = sorted((HERE / "emulator").iterdir())
    text = b"".join(file.read_bytes() for file in sources) + torch_version.encode() + sys.version.encode()
    folder = CACHE / hashlib.blake2b(text, digest_size=8).hexdigest()
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be building
        if not (folder / "emulated_device.dist-info" / "entry_points.txt").is_file():
            _compile(folder)
    return folder


def _compile(folder: Path) -> None:
    compiler = next(filter(None, map(shutil.which, ("g++", "c++"))), None)
    if compiler is None:
        raise CannotBuild("the emulated accelerator is built by a C++ compiler, and there is no g++")
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise CannotBuild(f"the emulated accelerator is built with headers of Python, and there are none in {headers}")
    torch = Path(importlib.util.find_spec("torch").origin).parent
    includes = [torch / "include", torch / "include/torch/csrc/api/include", headers]
    libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    folder.mkdir(exist_ok=True)
    command = [
        compiler, "-O0", "-std=c++20", "-fPIC", "-shared", "-D", "TORCH_EXTENSION_NAME=emulated_kernels",
        *(f"-isystem{path}" for path in includes), str(HERE / "emulator" / "emulator.cpp"),
        "-o", str(folder / "emulated_kernels.so"), f"-L{torch / 'lib'}", *libraries,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.splitlines()
        raise RuntimeError("\n".join([line for line in lines if "error" in line][:30] or lines[-30:]))
    about = folder / "emulated_device.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-device\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(_ENTRY)


if __name__ == "__main__":
    import torch

    print(built(torch.__version__))
