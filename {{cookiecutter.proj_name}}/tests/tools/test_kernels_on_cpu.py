"""The CUDA kernels without a GPU: the same sources, compiled for the CPU, with sanitizers that name a wrong line."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ENVIRONMENT, PROJECT
from tests.ops.conftest import NEEDS_COMPILER, OPS
from tests.ops.test_build import PACKAGE, project
from tools.kernels_on_cpu.build import build

__all__ = ["project"]  # a fixture
pytestmark = [NEEDS_COMPILER, pytest.mark.slow]

# flip(x) turns each row around, through the shared memory of a block.
MODULE = """\
import torch
from torch import Tensor

def reference(x: Tensor) -> Tensor:
    return x.flip(-1).contiguous()

operator = torch.library.custom_op("custom_ops::flip", reference, mutates_args=())
operator.register_autograd(lambda ctx, grad: grad.flip(-1))

def flip(x: Tensor) -> Tensor:
    return operator(x)

def example_inputs(*size):
    return [torch.randn(size)]
"""
KERNEL = """\
#include "launch.cuh"

using ops::Tensor;

template <typename scalar_t>
__global__ void flip_kernel(const scalar_t* __restrict__ x, scalar_t* __restrict__ out, int width) {
  __shared__ scalar_t row[256];
  const int j = threadIdx.x;
  if (j < width) row[j] = x[blockIdx.x * width + j];
  __syncthreads();
  if (j < width) out[blockIdx.x * width + j] = row[width - 1 - j];
}

Tensor flip(const Tensor& input) {
  const Tensor x = torch::stable::contiguous(input);
  Tensor out = torch::stable::empty_like(x);
  if (out.numel() == 0) return out;
  const int rows = x.size(0), width = x.size(1);
  DISPATCH_FLOATING(x.scalar_type(), "flip", [&] {
    flip_kernel<scalar_t><<<rows, 256, 0, ops::current_stream(x)>>>(
        x.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(), width);
  });
  ops::check_launch("flip");
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(custom_ops, CUDA, m) { m.impl("flip", TORCH_BOX(&flip)); }
"""


@pytest.fixture
def source(project: Path) -> Path:
    """The kernel of an operator `flip` in a project that has no other."""
    folder = project / PACKAGE / "ops"
    for old in (folder / "src").glob("*.c*p*"):
        old.unlink()
    (folder / "src" / "add_matrix.cu").unlink()
    (folder / "flip.py").write_text(MODULE)
    init = folder / "__init__.py"
    init.write_text(f'{init.read_text()}\nfrom {PACKAGE}.ops.flip import flip\n\n__all__ += ["flip"]\n')
    return folder / "src" / "flip.cu"


def compare(source: Path, *options: str) -> subprocess.CompletedProcess[str]:
    project = source.parents[3]
    command = [sys.executable, "-m", "tools.kernels_on_cpu", "flip", *options]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(project)}
    environment.pop("OPS_BUILD_DIR", None)
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def line_of(text: str) -> int:
    return KERNEL[: KERNEL.index(text)].count("\n") + 1


def test_right_kernels(source: Path) -> None:
    """All cases agree, and no sanitizer finds anything; shared memory is used and waited for."""
    source.write_text(KERNEL)
    done = compare(source, "--sanitize")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("64 of 64 cases agree") == 2, done.stdout
    assert "with AddressSanitizer" in done.stdout and "with ThreadSanitizer" in done.stdout
    assert done.stderr == ""


def test_an_index_out_of_range(source: Path) -> None:
    """The access, its line and its text, and which thread of which block it was."""
    source.write_text(KERNEL.replace("if (j < width) row[j] = x", "if (j <= width) row[j] = x"))
    done = compare(source, "--sanitize")
    assert done.returncode == 1
    place = f"{PACKAGE}/ops/src/flip.cu:{line_of('row[j] = x')}"
    assert "AddressSanitizer: heap-buffer-overflow, with float64 3 x 5 contiguous" in done.stderr
    assert f"  {place}: read of 8 bytes by block (2, 0, 0), thread (5, 0, 0)\n" in done.stderr
    assert "      if (j <= width) row[j] = x[blockIdx.x * width + j];\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_barrier(source: Path) -> None:
    """Both accesses of the race. Without a sanitizer the values are wrong, and no line is named."""
    source.write_text(KERNEL.replace("__syncthreads();", ""))
    done = compare(source, "--sanitize")
    assert done.returncode == 1
    assert "ThreadSanitizer: data race" in done.stderr
    for text, access in (("row[j] = x", "write"), ("row[width - 1 - j]", "read")):
        place = f"{PACKAGE}/ops/src/flip.cu:{line_of(text)}"
        assert f"  {place}: {access} of 8 bytes by block 0,0,0 thread " in done.stderr, done.stderr


def test_a_mistake_in_a_source(source: Path) -> None:
    """The compiler's message is about the line of the .cu. A name that is not known may be CUDA's."""
    source.write_text(KERNEL.replace("__syncthreads()", "__syncthread()"))
    done = compare(source)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    line = line_of("__syncthreads")
    assert f"{PACKAGE}/ops/src/flip.cu:{line}:3: error: " in done.stderr
    assert f"   {line} |   __syncthread();" in done.stderr
    assert "__syncthread: a typing error, or a part of CUDA that does not run on the CPU" in done.stderr


def test_the_cases_of_the_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_operators.py with the CUDA kernels of this project in place of the C++ ones."""
    monkeypatch.setenv("OPS_BUILD_DIR", str(tmp_path))
    library = build(OPS)
    cases = str(PROJECT / "tests" / "ops" / "test_operators.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", cases]
    environment = {**ENVIRONMENT, "OPS_BUILD_DIR": str(library.parent)}
    done = subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
