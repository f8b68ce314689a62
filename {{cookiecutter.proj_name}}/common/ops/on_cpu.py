"""CUDA kernels on the CPU: compiles the .cu files of a folder with the C++ compiler, and runs a program with them.

on_cpu.h has the part of CUDA that they can use. Sanitizers find what a GPU may hide: an index out of range, and threads
that read what others write without a barrier in between.
"""

import ctypes
import hashlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import torch

from common.config import shown_path
from common.ops.build import make_library
from common.ops.load import build_folder
from common.ops.toolchain import BuildError, Cuda, compile_command, find_compiler, link_command

CASE = "on_cpu: case "  # what a program says before each case
SANITIZERS = {"address": "AddressSanitizer", "thread": "ThreadSanitizer"}
HERE = Path(__file__).parent
EMPTY = ("cuda_runtime.h", "cuda_runtime_api.h", "torch/csrc/stable/accelerator.h")  # on_cpu.h has their contents
COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
LAUNCH = re.compile(r"(\s*)<<<(.*?)>>>(\s*)\(", re.DOTALL)
ALIGN = r"(?:(?:__align__|alignas)\([^)]*\)\s*)?"
DYNAMIC_SHARED = re.compile(rf"extern\s+{ALIGN}__shared__\s+{ALIGN}([^;]+?)\s*(\w+)\s*\[\s*\]\s*;")
SHARED = re.compile(rf"(?:(?:static|volatile)\s+)*{ALIGN}__shared__\s+{ALIGN}([^;]+);")
NOT_HERE = "a typing error, or a part of CUDA that does not run on the CPU (the guide of the operators has the list)"
KEY = re.compile(r"(LIBRARY_IMPL\(\s*\w+\s*,\s*)CUDA\b")
FOUND = re.compile(r"^.*(?:ERROR|WARNING|on_cpu): (\w+Sanitizer: [\w -]+?|error: .*)(?: on .*| \(.*)?$", re.MULTILINE)
ACCESS = re.compile(
    r"(?i)^ *(?:previous )?((?:atomic )?(?:read|write)) of size (\d+) at .*(?:thread (T\d+)|main thread)"
)
FRAME = re.compile(r"#\d+ .*?([^ /]+\.cuh?):(\d+)")
UNKNOWN = re.compile(
    r"error: (?:.*?['‘]([\w:]+)['’].*(?:not (?:been )?declared|not name|not a member|a template)|(\S+): No such file)"
)


def translate(text: str) -> str:
    """Return a .cu file as C++, each line where it was: launches, shared memory, and the device of its operators."""
    text = COMMENT.sub(_without_comment, text)
    for match in reversed([*LAUNCH.finditer(text)]):
        start = _start_of_callee(text, match.start())
        kernel = f"[&](auto... arguments) {{ {text[start : match.start()]}(arguments...); }}"
        text = f"{text[:start]}on_cpu::launch({kernel},{match[1]} {match[2]}){match[3]}({text[match.end() :]}"
    text = DYNAMIC_SHARED.sub(_dynamic_shared, text)
    return KEY.sub(r"\1CPU", SHARED.sub(_shared, text))


def _without_comment(match: re.Match[str]) -> str:
    if match[0].startswith('"'):
        return match[0]
    return " " + "\n" * match[0].count("\n")


def _start_of_callee(text: str, end: int) -> int:
    """Return where the expression that ends at `end` begins: names, ::, and what brackets enclose after a name."""
    depth = 0
    at = end
    while at > 0:
        character = text[at - 1]
        if character in ">])":
            depth += 1
        elif character in "<[(" and depth > 0:
            depth -= 1
        elif depth == 0 and not (character.isalnum() or character in "_:."):
            break
        at -= 1
    return at


def _dynamic_shared(match: re.Match[str]) -> str:
    reference = f"static {match[1]}*& {match[2]} = reinterpret_cast<{match[1]}*&>(on_cpu::dynamic_shared);"
    lines = match[0].count("\n")
    return "\n" * lines + " ".join(reference.split())


def _shared(match: re.Match[str]) -> str:
    """Shared memory is a reference to memory of the block: `float x[8], y` becomes a type and a reference for each."""
    declared = match[1]
    types = declared
    references = ""
    for part in re.split(r",(?![^<(\[]*[>)\]])", declared):
        named = re.search(r"(\w+)\s*(?:\[.*)?$", part, re.DOTALL)
        if named is None:
            continue
        name = named[1]
        types = re.sub(rf"\b{name}\b(?=\s*(?:\[|,|$))", f"{name}_shared", types, count=1)
        references += f" static char {name}_key; auto& {name} = on_cpu::shared_as<{name}_shared>(&{name}_key);"
    lost = match[0].count("\n") - types.count("\n")
    return "\n" * lost + f"typedef {types};{references}"


def build(folder: Path, sanitizer: str = "") -> Path:
    """Compile the .cu files of `folder` for the CPU. What has not changed since is not compiled again.

    Args:
        sanitizer: "address", "thread", or none.

    Raises:
        BuildError: a source does not compile, or uses a part of CUDA that on_cpu.h does not have; or there is no
            compiler.
    """
    compiler = find_compiler()
    if sys.platform != "linux" or compiler is None:
        raise BuildError("kernels on the CPU need Linux and a C++ compiler (apt install g++, or name it in CXX)")
    target = build_folder(folder) / "on_cpu" / (sanitizer or "plain")
    for name in ("objects/x", "src/x", *(f"include/{name}" for name in EMPTY)):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
    for name in EMPTY:
        (target / "include" / name).touch()
    headers = [HERE / "on_cpu.h", *(folder / "src").glob("*.*h")]
    for header in (folder / "src").glob("*.cuh"):
        (target / "src" / header.name).write_text(_translated(header))
    inputs = [torch.__version__, *(path.read_text() for path in headers)]
    search = [f"-I{target / 'include'}", f"-I{folder / 'src'}", "-include", str(HERE / "on_cpu.h")]
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", "-w", *search]
    compiles = [_command(HERE / "on_cpu.cpp", target, compiler, flags, inputs)]
    instrument = []
    if sanitizer:
        instrument.append(f"-fsanitize={sanitizer}")
    flags += instrument
    for source in sorted((folder / "src").glob("*.cu")):
        translated = target / "src" / f"{source.stem}.cpp"
        translated.write_text(_translated(source))
        compiles.append(_command(translated, target, compiler, flags, inputs))
    objects = [Path(command[command.index("-o") + 1]) for command in compiles]
    library = target / f"on_cpu-{_checksum(list(map(str, objects)))}.so"
    link = link_command(objects, library, compiler, Cuda(None, []))
    try:
        make_library(compiles, [*link, *instrument])
    except BuildError as error:
        unknown = UNKNOWN.search(str(error))
        if unknown is None:
            raise
        raise BuildError(f"{error}\n{unknown[1] or unknown[2]}: {NOT_HERE}") from None
    for old in [*target.glob("*.so"), *target.glob("objects/*")]:
        if old != library and old not in objects:
            old.unlink(missing_ok=True)
    return library


def _command(
    source: Path,
    target: Path,
    compiler: str,
    flags: list[str],
    inputs: list[str],
) -> list[str]:
    """Return the command that compiles a source; the name of its result changes with all that it depends on."""
    key = _checksum([compiler, *flags, *inputs, source.read_text()])
    made = target / "objects" / f"{source.stem}-{key}.o"
    command = compile_command(source, made, compiler, Cuda(None, []))
    return [*command, *flags]


def _checksum(parts: list[str]) -> str:
    text = "\n".join(parts)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _translated(source: Path) -> str:
    text = source.read_text()
    code = COMMENT.sub(_without_comment, text)
    assembly = re.search(r"\basm\b", code)
    if assembly is not None:
        line = code.count("\n", 0, assembly.start()) + 1
        raise BuildError(f"{shown_path(source)}:{line}: asm: instructions of a GPU do not run on the CPU")
    return f'#line 1 "{shown_path(source)}"\n{translate(text)}'


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
