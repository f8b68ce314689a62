"""The operators of a rendered project, compiled by the real nvcc, where there is one. No GPU is needed."""

import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from real import REPORT, need_nvcc
from support import Render

pytestmark = [pytest.mark.slow, pytest.mark.gpu("operators")]

LOADED = """
import torch
from custom.ops import implementation
print(implementation)
for name in ("add_matrix", "scale_exp", "scale_exp_backward"):
    for key in ("CPU", "CUDA"):
        print(name, key, torch._C._dispatch_has_kernel_for_dispatch_key(f"custom_ops::{name}", key))
"""
PTX, MACHINE_CODE = 1, 2  # kinds of code in a fat binary


@dataclass(frozen=True)
class Operators:
    """A rendered project, and a folder for the library of its operators."""

    project: Path
    folder: Path

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHON": sys.executable}
        environment |= {"OPS_BUILD_DIR": str(self.folder), "LD_BIND_NOW": "1", **variables}
        return subprocess.run(
            command, cwd=self.project, env=environment, capture_output=True, text=True, timeout=600, check=False
        )

    def install(self, **variables: str) -> subprocess.CompletedProcess[str]:
        variables = {"TORCH_CUDA_ARCH_LIST": "8.0;9.0+PTX", "FORCE_CUDA": "1", **variables}
        return self.run("sh", "scripts/install_ops.sh", **variables)

    def library(self) -> Path:
        (library,) = self.folder.glob("*.so")
        return library

    def elsewhere(self, folder: Path) -> "Operators":
        return Operators(self.project, folder)


@dataclass(frozen=True)
class Build(Operators):
    """What was compiled for all tests of this file, and what was said."""

    said: str
    ptxas: str


@pytest.fixture(scope="module")
def built(render: Render, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """One build for A100 and H100; the assembler says what each kernel uses."""
    version = need_nvcc()
    project = Path(shutil.copytree(render(), tmp_path_factory.mktemp("ops_cuda") / "project"))
    operators = Operators(project, tmp_path_factory.mktemp("library"))
    done = operators.install(NVCC_APPEND_FLAGS="-Xptxas -v")
    assert done.returncode == 0, done.stderr
    REPORT.append(f"nvcc {version}: the operators compile for sm_80 and sm_90")
    return Build(operators.project, operators.folder, said=done.stdout, ptxas=done.stderr)


def codes(library: Path) -> Iterator[tuple[int, int]]:
    """(kind, architecture) of each code in the fat binaries of a library, read from their headers."""
    data = library.read_bytes()
    for match in re.finditer(re.escape(struct.pack("<IHH", 0xBA55ED50, 1, 16)), data):
        (size,) = struct.unpack_from("<Q", data, match.start() + 8)
        at = match.start() + 16
        end = at + size
        while at < end:
            kind, _, header, length = struct.unpack_from("<HHIQ", data, at)
            yield kind, struct.unpack_from("<I", data, at + 28)[0]
            at += header + length


def test_both_sources_are_compiled_for_both_gpus(built: Build) -> None:
    """As the script says; the last one with PTX, for GPUs to come."""
    assert "custom/ops: built in" in built.said
    assert "CUDA  add_matrix.cu scale_exp.cu for 8.0, 9.0+PTX\n" in built.said
    assert str(built.library()) in built.said
    assert sorted(codes(built.library())) == 2 * [(PTX, 90)] + 2 * [(MACHINE_CODE, 80)] + 2 * [(MACHINE_CODE, 90)]


def test_no_kernel_spills_registers(built: Build) -> None:
    """Three kernels for four dtypes, each for two GPUs; nothing goes to slow memory."""
    kernels = re.findall(
        r"Compiling entry function '\S*?(add_matrix|scale_exp(?:_backward)?)_kernel\S*' for", built.ptxas
    )
    assert {name: kernels.count(name) for name in kernels} == {"add_matrix": 8, "scale_exp": 8, "scale_exp_backward": 8}
    used = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", built.ptxas)
    assert used == 24 * [("0", "0", "0")]


def test_it_loads_where_pytorch_has_no_cuda(built: Build) -> None:
    """Every symbol is found at once, and the kernels are registered for both kinds of device."""
    done = built.run(sys.executable, "-c", LOADED)
    assert done.returncode == 0, done.stderr
    assert "C++ on the CPU, CUDA for 8.0, 9.0+PTX on a GPU" in done.stdout
    names = ("add_matrix", "scale_exp", "scale_exp_backward")
    assert done.stdout.splitlines()[1:] == [f"{name} {key} True" for name in names for key in ("CPU", "CUDA")]


def test_its_cuda_runtime_is_its_own(built: Build) -> None:
    """PyTorch may bring another version of it; none of its functions is taken from there, or given to it."""
    done = subprocess.run(["nm", "-D", str(built.library())], capture_output=True, text=True, check=True)
    symbols = [line.split()[-1] for line in done.stdout.splitlines()]
    assert "torch_call_dispatcher" in symbols
    assert [name for name in symbols if re.match("_*cuda", name)] == []


def test_a_second_run_does_nothing(built: Build) -> None:
    """It says so, and leaves the library alone."""
    before = built.library(), built.library().stat().st_mtime_ns
    done = built.install()
    assert done.returncode == 0, done.stderr
    assert "custom/ops: up to date for PyTorch" in done.stdout
    assert (built.library(), built.library().stat().st_mtime_ns) == before
    # As on a login node that shares the folder with nodes that have GPUs.
    done = built.install(FORCE_CUDA="", CUDA_HOME="/nowhere")
    assert "up to date" in done.stdout
    assert "scale_exp.cu for 8.0, 9.0+PTX\n" in done.stdout
    assert (built.library(), built.library().stat().st_mtime_ns) == before


def test_what_cannot_be_built(built: Build, tmp_path: Path) -> None:
    """Refused at once, with what to do; nothing is left behind."""
    done = built.elsewhere(tmp_path).install(CUDA_HOME="/nowhere")
    assert done.returncode == 1
    assert done.stdout == ""
    error = "FORCE_CUDA=1, but there is no nvcc; install the CUDA toolkit, or name its folder"
    assert done.stderr.startswith("error: custom/ops was not built:\n" + error)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wanted", "named"), [("3.0", "compute_30"), pytest.param("Ampere", "compute_Ampere", marks=pytest.mark.full)]
)
def test_a_gpu_that_nvcc_does_not_know(built: Build, tmp_path: Path, wanted: str, named: str) -> None:
    """The compiler's own words, and the way out."""
    done = built.elsewhere(tmp_path).install(TORCH_CUDA_ARCH_LIST=wanted)
    assert done.returncode == 1
    assert named in done.stderr
    assert "FORCE_CUDA=0 builds the rest without CUDA." in done.stderr
    assert list(tmp_path.glob("*.so")) == []


def test_cuda_can_be_left_out(built: Build, tmp_path: Path) -> None:
    """With an nvcc on the machine, too."""
    operators = built.elsewhere(tmp_path)
    done = operators.install(FORCE_CUDA="0")
    assert done.returncode == 0, done.stderr
    assert "CUDA  none: FORCE_CUDA=0\n" in done.stdout
    assert list(codes(operators.library())) == []
    done = operators.run(sys.executable, "-c", LOADED)
    assert "C++ on the CPU, Python reference on a GPU" in done.stdout
    assert "scale_exp CPU True\nscale_exp CUDA False\n" in done.stdout
