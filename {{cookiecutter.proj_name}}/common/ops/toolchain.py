"""The compilers of this machine, and their command lines."""

import os
import shutil
import sys
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

    nvcc: str = ""
    architectures: tuple[str, ...] = ()
    why_not: str = ""


def find_compiler() -> str | None:
    """Find the C++ compiler: the one in CXX, else the first one found; None if there is none.

    Raises:
        BuildError: the compiler in CXX is not found.
    """
    wanted = os.environ.get("CXX")
    if not wanted:
        return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    compiler = shutil.which(wanted)
    if compiler is None:
        raise BuildError(f"CXX={wanted} is not on the PATH")
    return compiler


def find_cuda() -> Cuda:
    """Return whether to compile CUDA: if nvcc and a GPU are present, or if FORCE_CUDA=1 asks for it.

    Raises:
        BuildError: FORCE_CUDA=1 is impossible here.
    """
    forced = os.environ.get("FORCE_CUDA")
    if forced == "0":
        return Cuda(why_not="FORCE_CUDA=0")
    home = os.environ.get("CUDA_HOME")
    nvcc = shutil.which("nvcc", path=f"{home or '/usr/local/cuda'}/bin")
    if not home:
        nvcc = shutil.which("nvcc") or nvcc
    gpus = set()
    for number in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(number)
        gpus.add(f"{major}.{minor}")
    if nvcc is None:
        why_not = "there is no nvcc; install the CUDA toolkit, or name its folder in CUDA_HOME"
    elif torch.__version__ < CUDA_SINCE:
        why_not = f"the kernels need PyTorch {CUDA_SINCE} or newer, and this is {torch.__version__}"
    elif not gpus and forced != "1":
        why_not = "PyTorch finds no GPU here; FORCE_CUDA=1 compiles for others"
    else:
        chosen = os.environ.get("TORCH_CUDA_ARCH_LIST") or " ".join(sorted(gpus)) or ARCHITECTURES
        return Cuda(nvcc, tuple(chosen.replace(";", " ").split()))
    if forced == "1":
        raise BuildError(f"FORCE_CUDA=1, but {why_not}")
    return Cuda(why_not=why_not)


def compile_command(
    source: Path,
    target: Path,
    compiler: str,
    cuda: Cuda,
) -> list[str]:
    """Return the command that compiles one source, .cpp or .cu. It stops at the first error."""
    paths = ["-isystem", f"{TORCH}/include", "-c", str(source), "-o", str(target)]
    flags = [*FLAGS, "-Wfatal-errors"]
    if source.suffix == ".cpp":
        return [compiler, *flags, *paths]
    optimize, standard, *for_host = flags
    command = [cuda.nvcc, optimize, standard, "-ccbin", compiler]
    command += ["-Xcompiler", ",".join(for_host)]
    for architecture in cuda.architectures:
        number = architecture.removesuffix("+PTX").replace(".", "")
        command.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if architecture.endswith("+PTX"):
            command.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    return [*command, *paths]


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
    if cuda.nvcc:
        command = [cuda.nvcc, "-nodlink", "-ccbin", compiler]
        strict = ["-Xlinker", "--no-undefined"]
    command += ["-shared", *map(str, objects), "-o", str(target)]
    command += [f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu"]
    if sys.platform == "linux":  # a missing symbol is found here, not at the first import
        command += strict
    return command
