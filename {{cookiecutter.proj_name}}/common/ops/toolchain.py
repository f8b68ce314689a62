"""The compilers of this machine, and their command lines."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common.ops.library import FLAGS, torch_folder, torch_version

ARCHITECTURES = "8.0 9.0+PTX"  # without a GPU here: A100 and H100; newer ones compile the PTX when they load it
CUDA_SINCE = (2, 13)  # the first PyTorch whose stable ABI gives access to the current stream


class BuildError(Exception):
    """A build that is impossible; the message says what is wrong, and what to do."""


@dataclass(frozen=True)
class Cuda:
    """nvcc and the GPUs to compile for; or neither, and the reason."""

    nvcc: Path | None
    architectures: list[str]
    why_not: str = ""
    refused: bool = False  # by FORCE_CUDA=0


def find_compiler(environment: Mapping[str, str] = os.environ) -> str | None:
    """The C++ compiler: the one in CXX, else the first one found; None if there is none.

    Raises:
        BuildError: the compiler in CXX is not found.
    """
    wanted = environment.get("CXX")
    for name in [wanted] if wanted else ["c++", "g++", "clang++"]:
        if found := shutil.which(name):
            return found
    if wanted:
        raise BuildError(f"CXX={wanted} is not on the PATH")
    return None


def find_cuda(environment: Mapping[str, str] = os.environ) -> Cuda:
    """Whether to compile CUDA: if nvcc and a GPU are present, or if FORCE_CUDA=1 asks for it.

    Raises:
        BuildError: FORCE_CUDA=1 is impossible here.
    """
    forced, nvcc, gpus = environment.get("FORCE_CUDA"), _find_nvcc(environment), _architectures_here()
    version = tuple(int(part) for part in torch_version().split(".")[:2])
    if forced == "0":
        return Cuda(None, [], "FORCE_CUDA=0", refused=True)
    if nvcc is None:
        why_not = "there is no nvcc; install the CUDA toolkit, or name its folder in CUDA_HOME"
    elif version < CUDA_SINCE:
        why_not = f"the kernels need PyTorch {'.'.join(map(str, CUDA_SINCE))} or newer, and this is {torch_version()}"
    elif not gpus and forced != "1":
        why_not = "this machine has no GPU; FORCE_CUDA=1 compiles for others"
    else:
        chosen = environment.get("TORCH_CUDA_ARCH_LIST") or " ".join(gpus) or ARCHITECTURES
        return Cuda(nvcc, chosen.replace(";", " ").split())
    if forced == "1":
        raise BuildError(f"FORCE_CUDA=1, but {why_not}")
    return Cuda(None, [], why_not)


def _find_nvcc(environment: Mapping[str, str]) -> Path | None:
    if home := environment.get("CUDA_HOME") or environment.get("CUDA_PATH"):
        return nvcc if (nvcc := Path(home, "bin", "nvcc")).is_file() else None
    found = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    return Path(found) if found else None


def _architectures_here() -> list[str]:
    """The compute capabilities of the GPUs in this machine, such as 9.0; none without a driver."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return sorted({line.strip() for line in done.stdout.splitlines() if re.fullmatch(r"\d+\.\d", line.strip())})


def compile_command(source: Path, target: Path, compiler: str, cuda: Cuda) -> list[str]:
    """The command that compiles one source, .cpp or .cu."""
    include_and_files = ["-isystem", str(torch_folder() / "include"), "-c", str(source), "-o", str(target)]
    if source.suffix == ".cpp":
        return [compiler, *FLAGS, *include_and_files]
    code = []
    for each in cuda.architectures:
        number = each.removesuffix("+PTX").replace(".", "")
        code.append(f"-gencode=arch=compute_{number},code=sm_{number}")
        if each.endswith("+PTX"):
            code.append(f"-gencode=arch=compute_{number},code=compute_{number}")
    optimize, standard, *for_host = FLAGS
    flags = [optimize, standard, "-Xcompiler", ",".join(for_host), "-ccbin", compiler]
    return [str(cuda.nvcc), *flags, *code, *include_and_files]


def link_command(objects: list[Path], target: Path, compiler: str, cuda: Cuda) -> list[str]:
    """The command that links the objects into a library. CUDA's runtime is linked statically, so it loads anywhere."""
    command = [compiler] if cuda.nvcc is None else [str(cuda.nvcc), "-nodlink", "-ccbin", compiler]
    command += ["-shared", *map(str, objects), "-o", str(target)]
    command += [f"-L{torch_folder() / 'lib'}", "-ltorch", "-ltorch_cpu"]
    if sys.platform == "linux":  # a missing symbol is found here, not at the first import
        command += ["-Wl,--no-undefined"] if cuda.nvcc is None else ["-Xlinker", "--no-undefined"]
    return command
