"""Run a program with CUDA kernels on the CPU, and say what sanitizers found in words and lines of the .cu."""

import ctypes
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from common.config import shown_path
from common.ops.toolchain import BuildError, find_compiler
from tools.kernels_on_cpu.build import build

CASE = "on_cpu: case "  # what a program says before each case
SANITIZERS = {"address": "AddressSanitizer", "thread": "ThreadSanitizer"}
FOUND = re.compile(r"^.*(?:ERROR|WARNING|on_cpu): (\w+Sanitizer: [\w -]+?|error: .*)(?: on .*| \(.*)?$", re.MULTILINE)
ACCESS = re.compile(
    r"(?i)^ *(?:previous )?((?:atomic )?(?:read|write)) of size (\d+) at .*(?:thread (T\d+)|main thread)"
)
FRAME = re.compile(r"#\d+ .*?([^ /]+\.cuh?):(\d+)")


def run_on_cpu(folder: Path, words: list[str], sanitize: bool = False) -> int:
    """Run `python *words`, which finds the path of the compiled kernels in OPS_ON_CPU; with each sanitizer, if asked.

    What a sanitizer reports is printed with the lines of the .cu, and kept whole in a file. Returns the exit code.
    """
    code = 0
    sanitizers = [""]
    if sanitize:
        sanitizers = list(SANITIZERS)
    try:
        for sanitizer in sanitizers:
            library = build(folder, sanitizer)
            code = max(code, _run_with(sanitizer, library, folder, words))
    except BuildError as error:
        print(f"error: {shown_path(folder)} was not compiled for the CPU:\n{error}", file=sys.stderr)
        return 1
    return code


def _run_with(
    sanitizer: str,
    library: Path,
    folder: Path,
    words: list[str],
) -> int:
    title = f"CUDA kernels of {shown_path(folder / 'src')} on the CPU"
    if sanitizer:
        title += f", with {SANITIZERS[sanitizer]}"
    print(title, flush=True)
    environment = dict(os.environ)
    environment["OPS_BUILD_DIR"] = str(library.parent)
    environment["OPS_ON_CPU"] = str(library)
    if sanitizer:
        preloaded = [_runtime(f"lib{sanitizer[0]}san.so"), _runtime("libstdc++.so.6")]
        environment["LD_PRELOAD"] = " ".join(preloaded)
        environment["OMP_NUM_THREADS"] = "1"
        environment["ASAN_OPTIONS"] = "detect_leaks=0"
        environment["TSAN_OPTIONS"] = "halt_on_error=1:ignore_noninstrumented_modules=1"
        ctypes.CDLL(None).personality(0x0040000)  # no random addresses: ThreadSanitizer cannot use some of them
    command = [sys.executable, *words]
    done = subprocess.run(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        return 0
    report = library.parent / "report.txt"
    report.write_text(done.stderr)
    lines = explain(done.stderr, folder)
    if not lines:
        lines += [line for line in done.stderr.splitlines() if not line.startswith(CASE)]
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        lines.append(f"error: the program was ended by {name}, {_last_case(done.stderr)}; --sanitize names the line")
    if lines:
        print("\n".join([*lines, f"Everything it said: {shown_path(report)}"]), file=sys.stderr)
    return 1


def _last_case(said: str) -> str:
    case = "before the first case"
    for line in said.splitlines():
        if line.startswith(CASE):
            case = f"with {line.removeprefix(CASE)}"
    return case


def _runtime(name: str) -> str:
    """Return the path of a library of the compiler, to be loaded before Python's own."""
    compiler = str(find_compiler())
    path = subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip()
    if not Path(path).is_absolute():
        raise BuildError(f"{compiler} has no {name}: --sanitize needs g++ (CXX=g++) and its sanitizers")
    return path


def explain(said: str, folder: Path) -> list[str]:
    """Return what a sanitizer or on_cpu.cpp found, with the source lines; empty: nothing that they say."""
    found = FOUND.search(said)
    if found is None:
        return []
    place = re.search(r"^on_cpu: (block .*)", said, re.MULTILINE)
    default = "the host"
    if place is not None:
        default = place[1]
    names = dict(re.findall(r"Thread (T\d+) '(.*?)'", said))
    lines = [f"{found[1]}, {_last_case(said)}"]
    if found[1].startswith("error"):
        lines.append(f"  {default}")
    who = ""
    for line in said[found.start() :].splitlines():
        access = ACCESS.search(line)
        frame = FRAME.search(line)
        if access is not None:
            who = f"{access[1].lower()} of {access[2]} bytes by {names.get(access[3], default)}"
        elif frame is not None and who:
            source = folder / "src" / frame[1]
            lines += _shown(source, int(frame[2]), who)
            who = ""
    return lines


def _shown(source: Path, number: int, text: str) -> list[str]:
    lines = [f"  {shown_path(source)}:{number}: {text}"]
    if source.is_file():
        lines.append(f"      {source.read_text().splitlines()[number - 1].strip()}")
    return lines
