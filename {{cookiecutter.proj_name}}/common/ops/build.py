"""Compile a folder of operators: C++ always, CUDA if possible.

The compilers are called directly: PyTorch's build helper refuses to compile CUDA where PyTorch was built without it.
The sources are written against PyTorch's stable ABI, and so need nothing but its headers and its CPU library.
"""

import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from common.base.files import write_text
from common.base.process import available_cores
from common.config import shown_path
from common.ops.load import Record, build_folder, find, library_path, record_now
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
    current = find(folder)
    architectures = cuda.architectures
    is_refused = os.environ.get("FORCE_CUDA") == "0"
    if cuda.nvcc is None and not is_refused and current.library is not None:
        architectures = list(current.architectures)  # made for the GPUs of other nodes, which share this folder
    record = record_now(folder, architectures)
    library = library_path(folder, record)
    done = "up to date"
    if current.library != library:
        if compiler is None:
            return f"{folder}: nothing is built, since there is no C++ compiler on the PATH.\n{_WITHOUT_COMPILER}"
        _make(folder, record, library, compiler, cuda)
        done = f"built in {time.monotonic() - start:.1f} s"
    cpp = " ".join(name for name in record.sources if name.endswith(".cpp"))
    cu = " ".join(name for name in record.sources if name.endswith(".cu"))
    gpu = f"none: {cuda.why_not}"
    if architectures:
        gpu = f"{cu} for {', '.join(architectures)}"
    return f"{folder}: {done} for PyTorch {record.torch}\n  C++   {cpp}\n  CUDA  {gpu}\n  {library}"


def _make(
    folder: Path,
    record: Record,
    library: Path,
    compiler: str,
    cuda: Cuda,
) -> None:
    """Compile what changed, link, and put the library in its place, whole; then remove what it replaces."""
    target = build_folder(folder)
    objects_folder = target / "objects"
    objects_folder.mkdir(parents=True, exist_ok=True)
    here = str(Path.cwd())
    objects: list[Path] = []
    commands = []
    entries = []
    for name in record.sources:
        if name.endswith((".cpp", ".cu")):
            source = folder / "src" / name
            made = objects_folder / _object_name(source, record, compiler, cuda)
            command = compile_command(source, made, compiler, cuda)
            objects.append(made)
            commands.append(command)
            entries.append({"directory": here, "file": str(source), "arguments": command})
    # Editors take the include paths from this file; clangd finds it in `build` on its own.
    (target / "compile_commands.json").write_text(json.dumps(entries, indent=1))
    make_library(commands, link_command(objects, library, compiler, cuda))
    text = json.dumps(asdict(record), indent=1)
    write_text(library.with_suffix(".json"), text)  # without it, no library counts
    for old in [*target.glob(f"{library.name.rpartition('-')[0]}-*"), *objects_folder.iterdir()]:
        if old.stem != library.stem and old not in objects:
            old.unlink(missing_ok=True)


def make_library(compiles: list[list[str]], link: list[str]) -> None:
    """Run the commands whose result is missing: compilers, then the linker. Results are put in their place whole.

    Raises:
        BuildError: a command fails.
    """

    library = Path(link[link.index("-o") + 1])
    with tempfile.TemporaryDirectory(dir=library.parent) as temporary:

        def run(command: list[str]) -> None:
            at = command.index("-o") + 1
            result = Path(command[at])
            if not result.exists():
                fresh = Path(temporary, result.name)
                _run([*command[:at], str(fresh), *command[at + 1 :]])
                fresh.replace(result)

        with ThreadPoolExecutor(max_workers=available_cores()) as pool:
            list(pool.map(run, compiles))
        run(link)


def _object_name(source: Path, record: Record, compiler: str, cuda: Cuda) -> str:
    """Return the file name of a compiled source: it changes with all that the result depends on, but other sources."""
    headers = {}
    for name, checksum in record.sources.items():
        if name.endswith((".h", ".cuh")):
            headers[name] = checksum
    command = compile_command(source, Path(), compiler, cuda)
    parts = [
        record.torch,
        record.sources[source.name],
        headers,
        command,
        os.environ.get("NVCC_APPEND_FLAGS"),
    ]
    return f"{source.name}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}.o"


def _run(command: list[str]) -> None:
    """Run a compiler and show its warnings. If it fails, its first message is the error; a file has the rest."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        print(done.stderr, end="", file=sys.stderr)
        return
    said = (done.stderr + done.stdout).splitlines()
    first = 0
    for at, line in enumerate(said):
        if re.search(r"\berror\b|undefined reference", line):
            first = at
            break
    log = Path(command[command.index("-o") + 1]).parents[1] / "errors.txt"
    text = "\n".join([shlex.join(command), "", *said, ""])
    log.write_text(text)
    without = ""
    if "nvcc" in command[0]:
        without = " FORCE_CUDA=0 builds the rest without CUDA."
    raise BuildError("\n".join([*said[first : first + 5], f"Everything it said: {shown_path(log)}.{without}"]))
