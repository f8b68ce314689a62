"""Compile a folder of operators: C++ always, CUDA if possible.

The compilers are called directly: PyTorch's build helper refuses to compile CUDA where PyTorch was built without it.
The sources are written against PyTorch's stable ABI, and so need nothing but its headers and its CPU library.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from common.base.process import available_cores
from common.ops.load import find, library_name, library_path
from common.ops.toolchain import BuildError, Cuda, compile_command, find_compiler, find_cuda, link_command

# Not an error: the kernels are optional, and a script that trains afterwards should continue.
_WITHOUT_COMPILER = """\
  The operators run in Python, so training works. For the kernels install a compiler (Debian, Ubuntu: apt install g++;
  macOS: xcode-select --install; on a cluster: module load gcc), or name one in CXX."""


def build(folder: Path) -> str:
    """Build the library of the operators in `folder` unless it is current. Returns what was built, in words.

    Raises:
        BuildError: a source does not compile, or what CXX or the CUDA variables ask for is not available.
    """
    start = time.monotonic()
    compiler = find_compiler()
    cuda = find_cuda()
    architectures = cuda.architectures
    current = find(folder)
    if not cuda.nvcc and os.environ.get("FORCE_CUDA") != "0":
        architectures = current.architectures  # made for the GPUs of other nodes, which share this folder
    library = library_path(folder, architectures)
    sources = sorted((folder / "src").glob("*.cpp"))
    cpp = " ".join(source.name for source in sources)
    gpu = f"none: {cuda.why_not}"
    if architectures:
        kernels = sorted((folder / "src").glob("*.cu"))
        sources += kernels
        gpu = f"{' '.join(source.name for source in kernels)} for {', '.join(architectures)}"
    done = "up to date"
    if current.library != library:
        if compiler is None:
            return f"{folder}: nothing is built, since there is no C++ compiler on the PATH.\n{_WITHOUT_COMPILER}"
        _make(folder, sources, library, compiler, cuda)
        done = f"built in {time.monotonic() - start:.1f} s"
    return f"{folder}: {done} for PyTorch {torch.__version__}\n  C++   {cpp}\n  CUDA  {gpu}\n  {library}"


def _make(
    folder: Path,
    sources: list[Path],
    library: Path,
    compiler: str,
    cuda: Cuda,
) -> None:
    """Compile all, link, and put the library in its place, whole; then remove what it replaces."""
    target = library.parent
    target.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    objects = []
    with tempfile.TemporaryDirectory(dir=target) as temporary:
        for source in sources:
            made = Path(temporary, f"{source.name}.o")
            objects.append(made)
            command = compile_command(source, made, compiler, cuda)
            entry = {"directory": str(Path.cwd()), "file": str(source)}
            entries.append({**entry, "arguments": command})
        # Editors take the include paths from this file; clangd finds it in `build` on its own.
        (target / "compile_commands.json").write_text(json.dumps(entries, indent=1))
        run_compilers([entry["arguments"] for entry in entries])
        fresh = Path(temporary, library.name)
        run_compilers([link_command(objects, fresh, compiler, cuda)])
        fresh.replace(library)
    for old in target.glob(f"{library_name(folder)}-*.so"):
        if old != library:
            old.unlink(missing_ok=True)


def run_compilers(commands: list[list[str]]) -> None:
    """Run the commands side by side, and show their warnings.

    Raises:
        BuildError: a command fails; the message is what it said.
    """

    def run(command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            hint = ""
            if "nvcc" in command[0]:
                hint = "FORCE_CUDA=0 builds the rest without CUDA."
            raise BuildError(done.stderr + done.stdout + hint)
        print(done.stderr, end="", file=sys.stderr)

    with ThreadPoolExecutor(max_workers=available_cores()) as pool:
        list(pool.map(run, commands))
