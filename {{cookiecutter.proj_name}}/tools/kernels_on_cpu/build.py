"""The library of a folder's CUDA kernels, compiled for the CPU."""

import re
import shutil
import sys
import tempfile
from pathlib import Path

from common.config import shown_path
from common.ops.build import run_compilers
from common.ops.load import build_folder
from common.ops.toolchain import BuildError, Cuda, compile_command, find_compiler, link_command
from tools.kernels_on_cpu.translate import translate, without_comments

HERE = Path(__file__).parent
EMPTY = ("cuda_runtime.h", "cuda_runtime_api.h", "torch/csrc/stable/accelerator.h")  # on_cpu.h has their contents
NOT_HERE = "a typing error, or a part of CUDA that does not run on the CPU (docs/tools/kernels_on_cpu.md has the list)"
UNKNOWN = re.compile(
    r"error: (?:.*?['‘]([\w:]+)['’].*(?:not (?:been )?declared|not name|not a member|a template)|(\S+): No such file)"
)


def build(folder: Path, sanitizer: str = "") -> Path:
    """Compile the .cu files of `folder` for the CPU. Returns the library.

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
    shutil.rmtree(target, ignore_errors=True)
    for name in EMPTY:
        header = target / "include" / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.touch()
    flags = ["-O1", "-g", "-fno-omit-frame-pointer", "-w", f"-I{target / 'include'}", f"-I{folder / 'src'}"]
    flags += ["-include", str(HERE / "on_cpu.h")]
    instrument = []
    if sanitizer:
        instrument.append(f"-fsanitize={sanitizer}")
    translated = target / "src"
    translated.mkdir()
    for header in (folder / "src").glob("*.cuh"):
        (translated / header.name).write_text(_translated(header))
    library = target / "on_cpu.so"
    with tempfile.TemporaryDirectory(dir=target) as temporary:
        made = Path(temporary, "on_cpu.o")
        objects = [made]
        compiles = [[*compile_command(HERE / "on_cpu.cpp", made, compiler, Cuda()), *flags]]
        for source in sorted((folder / "src").glob("*.cu")):
            plain = translated / f"{source.stem}.cpp"
            plain.write_text(_translated(source))
            made = Path(temporary, f"{source.stem}.cu.o")
            objects.append(made)
            compiles.append([*compile_command(plain, made, compiler, Cuda()), *flags, *instrument])
        try:
            run_compilers(compiles)
            run_compilers([[*link_command(objects, library, compiler, Cuda()), *instrument]])
        except BuildError as error:
            unknown = UNKNOWN.search(str(error))
            if unknown is None:
                raise
            raise BuildError(f"{error}{unknown[1] or unknown[2]}: {NOT_HERE}") from None
    return library


def _translated(source: Path) -> str:
    text = source.read_text()
    code = without_comments(text)
    assembly = re.search(r"\basm\b", code)
    if assembly is not None:
        line = code.count("\n", 0, assembly.start()) + 1
        raise BuildError(f"{shown_path(source)}:{line}: asm: instructions of a GPU do not run on the CPU")
    return f'#line 1 "{shown_path(source)}"\n{translate(text)}'
