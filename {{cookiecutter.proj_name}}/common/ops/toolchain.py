"""The compilers of this machine, and their command lines."""

import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from common.ops.load import FLAGS

ARCHITECTURES = "8.0 9.0+PTX"  # without a GPU here: A100 and H100; newer ones compile the PTX when they load it
CUDA_SINCE = "2.13"  # the first PyTorch whose stable ABI gives access to the current stream
TORCH = Path(torch.__file__).parent


class BuildError(Exception):
    """A build that is impossible; the message says what is wrong, and what to do."""


@dataclass(frozen=True)
class Cuda:
    """nvcc and the GPUs to compile for; or neither, and the reason."""

    nvcc: Path | None
    architectures: list[str]
    why_not: str = ""


def find_compiler(environment: Mapping[str, str] = os.environ) -> str | None:
    """Find the C++ compiler: the one in CXX, else the first one found; None if there is none.

    Raises:
        BuildError: the compiler in CXX is not found.
    """
    wanted = environment.get("CXX")
    names = ["c++", "g++", "clang++"]
    if wanted:
        names = [wanted]
    for name in names:
        compiler = shutil.which(name)
        if compiler is not None:
            return compiler
    if wanted:
        raise BuildError(f"CXX={wanted} is not on the PATH")
    return None


def find_cuda() -> Cuda:
    """Return whether to compile CUDA: if nvcc and a GPU are present, or if FORCE_CUDA=1 asks for it.

    Raises:
        BuildError: FORCE_CUDA=1 is impossible here.
    """
    forced = os.environ.get("FORCE_CUDA")
    nvcc = _find_nvcc()
    gpus = set()
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        gpus.add(f"{major}.{minor}")
    if forced == "0":
        return Cuda(None, [], "FORCE_CUDA=0")
    if nvcc is None:
        why_not = "there is no nvcc; install the CUDA toolkit, or name its folder in CUDA_HOME"
    elif torch.__version__ < CUDA_SINCE:
        why_not = f"the kernels need PyTorch {CUDA_SINCE} or newer, and this is {torch.__version__}"
    elif not gpus and forced != "1":
        why_not = "PyTorch finds no GPU here; FORCE_CUDA=1 compiles for others"
    else:
        chosen = os.environ.get("TORCH_CUDA_ARCH_LIST") or " ".join(sorted(gpus)) or ARCHITECTURES
        return Cuda(nvcc, chosen.replace(";", " ").split())
    if forced == "1":
        raise BuildError(f"FORCE_CUDA=1, but {why_not}")
    return Cuda(None, [], why_not)


def _find_nvcc() -> Path | None:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        nvcc = Path(home, "bin", "nvcc")
        return nvcc if nvcc.is_file() else None
    path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return Path(path) if path else None


def compile_command(
    source: Path,
    target: Path,
    compiler: str,
    cuda: Cuda,
) -> list[str]:
    """Return the command that compiles one source, .cpp or .cu."""
    include_and_files = [
        "-isystem",
        str(TORCH / "include"),
        "-c",
        str(source),
        "-o",
        str(target),
    ]
    if source.suffix == ".cpp":
        return [compiler, *FLAGS, *include_and_files]
    code = []
    for architecture in cuda.architectures:
        number = architecture.removesuffix("+PTX").replace(".", "")
        code.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if architecture.endswith("+PTX"):
            code.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    optimize, standard, *for_host = FLAGS
    flags = [optimize, standard, "-Xcompiler", ",".join(for_host), "-ccbin", compiler]
    return [str(cuda.nvcc), *flags, *code, *include_and_files]


def link_command(
    objects: list[Path],
    target: Path,
    compiler: str,
    cuda: Cuda,
) -> list[str]:
    """Return the command that links the objects into a library.

    CUDA's runtime is linked statically, so it loads anywhere.
    """
    command = [compiler]
    strict = ["-Wl,--no-undefined"]
    if cuda.nvcc is not None:
        command = [str(cuda.nvcc), "-nodlink", "-ccbin", compiler]
        strict = ["-Xlinker", "--no-undefined"]
    command += ["-shared", *map(str, objects), "-o", str(target)]
    command += [f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu"]
    if sys.platform == "linux":  # a missing symbol is found here, not at the first import
        command += strict
    return command
