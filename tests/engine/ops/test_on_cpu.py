"""CUDA on the CPU: what kernels can use, and what ends them with a line instead of a hang or a wrong number."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.ops.toolchain import BuildError
from tests.conftest import ENVIRONMENT, PROJECT
from tests.ops.conftest import NEEDS_COMPILER, OPS
from tools.kernels_on_cpu.build import build
from tools.kernels_on_cpu.translate import translate

HEAD = '#include "launch.cuh"\n\nusing ops::Tensor;\n\n'
# One operator, f(x, kind): x (N, M) float32 to a tensor like x.
TAIL = """
Tensor f(const Tensor& x, int64_t kind) {
  Tensor out = torch::stable::empty_like(x);
  launch(x.const_data_ptr<float>(), out.mutable_data_ptr<float>(), x.size(0), x.size(1), kind);
  ops::check_launch("f");
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(custom_ops, CUDA, m) { m.impl("f", TORCH_BOX(&f)); }
"""
MANY = """
__constant__ float factors[2];
__device__ int visits;

template <typename T>
__global__ void lanes(const T* x, T* out, int kind) {  // 64 threads; the last warp's upper half has left
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const T value = x[i];
  out[i] = value;
  if (threadIdx.x >= 48) return;
  const unsigned all = threadIdx.x < 32 ? 0xffffffff : 0xffff;
  if (kind == 0) out[i] = __shfl_xor_sync(all, value, 1);
  if (kind == 1) out[i] = __shfl_down_sync(all, value, 2, 8);
  if (kind == 2) out[i] = __shfl_up_sync(all, value, 3);
  if (kind == 3) out[i] = __shfl_sync(all, value, 5);
  if (kind == 4) out[i] = __popc(__ballot_sync(all, value > 0)) + (__any_sync(all, value > 9) ? 100 : 0);
}

__global__ void total(const float* x, float* out, int n) {
  extern __shared__ float sums[];
  __shared__ unsigned last, pairs[2][4];
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (threadIdx.x == 0) last = 0;
  sums[threadIdx.x] = i < n ? x[i] : 0.f;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  atomicAdd(&pairs[threadIdx.x & 1][0], 0u);
  atomicMax(&last, threadIdx.x);
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(out, sums[0] * factors[0] + factors[1] * static_cast<float>(last + 1 - blockDim.x));
    __threadfence();
    if (atomicAdd(&visits, 1) == gridDim.x - 1) out[1] = visits;
  }
}

__global__ void pairs(const float* x, float* out) {
  const int i = threadIdx.x + blockDim.x * threadIdx.y;
  const float4 four = reinterpret_cast<const float4*>(x)[i];
  reinterpret_cast<float4*>(out)[i] = make_float4(four.w, max(four.z, 0.f), min(1, 2), rsqrt(4.f));
}

void launch(const float* x, float* out, int64_t rows, int64_t columns, int64_t kind) {
  const int n = rows * columns;
  if (kind < 5) lanes<<<n / 64, 64>>>(x, out, static_cast<int>(kind));
  if (kind == 5) {
    const float two[2] = {2.f, 1.f};
    cudaMemcpyToSymbol(factors, two, sizeof two);
    cudaMemsetAsync(out, 0, n * sizeof(float), nullptr);
    visits = 0;
    auto kernel = total;
    kernel<<<dim3((n + 31) / 32), 32, 32 * sizeof(float)>>>(x, out, n);
  }
  if (kind == 6) pairs<<<1, dim3(4, n / 16)>>>(x, out);
  if (kind == 7) pairs<<<1, 1025>>>(x, out);
}
"""
CHECK = """
import os, torch
library = torch.library.Library("custom_ops", "FRAGMENT")
library.define("f(Tensor x, int kind) -> Tensor")
torch.ops.load_library(os.environ["OPS_ON_CPU"])
x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
f = torch.ops.custom_ops.f
"""
RIGHT = """
index = torch.arange(64)
def warps(source):  # of each lane in a whole warp, and in the half one
    whole, half = source(32), source(16)
    return torch.cat([whole, 32 + half, torch.arange(48, 64)])
def down(size):
    lane = torch.arange(size)
    return torch.where(lane % 8 + 2 < 8, lane + 2, lane)
def up(size):
    lane = torch.arange(size)
    return torch.where(lane >= 3, lane - 3, lane)
def swap(size):
    return torch.arange(size) ^ 1
def fifth(size):
    return torch.full((size,), 5)
for kind, source in enumerate((swap, down, up, fifth)):
    assert torch.equal(f(x, kind), x[:, warps(source)]), kind
votes = f(x, 4)
assert (votes[:, :32] == (x[:, :32] > 0).sum(1, keepdim=True)).all()
assert (votes[:, 32:48] == (x[:, 32:48] > 0).sum(1, keepdim=True)).all()
result = f(x, 5)
torch.testing.assert_close(result[0, 0], 2 * x.sum())
assert result[0, 1] == 4
four, given = x.view(-1, 4), f(x, 6).view(-1, 4)
assert torch.equal(given[:, 0], four[:, 3]) and torch.equal(given[:, 1], four[:, 2].relu())
assert (given[:, 2] == 1).all() and (given[:, 3] == 0.5).all()
try:
    f(x, 7)
except RuntimeError as error:
    assert "f: the CUDA kernel could not be launched: invalid configuration argument" in str(error)
else:
    raise AssertionError("a block of 1,025 threads")
assert f(x, 0).isfinite().all()  # the error was that of one launch
print("all right")
"""


def ops(folder: Path, kernel: str, tail: str = TAIL) -> Path:
    """A folder of operators with one source."""
    (folder / "src").mkdir(parents=True)
    for header in ("kernels.h", "launch.cuh"):
        (folder / "src" / header).write_text((OPS / "src" / header).read_text())
    (folder / "src" / "f.cu").write_text(HEAD + kernel + tail)
    return folder


def run(folder: Path, code: str, *, sanitize: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the code with the kernels of the folder, as `tools.kernels_on_cpu` does."""
    start = "import sys; from pathlib import Path; from tools.kernels_on_cpu.run import run_on_cpu"
    call = f"sys.exit(run_on_cpu(Path(sys.argv[1]), ['-c', sys.argv[2]], {sanitize}))"
    command = [sys.executable, "-c", f"{start}; {call}", str(folder), code]
    environment = {**ENVIRONMENT, "PYTHONPATH": str(PROJECT)}
    environment.pop("OPS_BUILD_DIR", None)
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def line_of(kernel: str, text: str) -> int:
    whole = HEAD + kernel
    return whole[: whole.index(text)].count("\n") + 1


def test_each_line_stays_where_it_was() -> None:
    """Launches with a line break, comments that look like code, several arrays in one declaration."""
    for text in (
        "  kernel<T, 4>\n      <<<grid, 32,\n      0, stream>>>\n  (x);\n",
        "/* __shared__ memory;\n is <<< fast >>>( */ // __shared__ too;\n",
        "  __shared__ float a[4],\n      b[2][2];\n",
        "extern __shared__ __align__(16)\n  unsigned char bytes[];\n",
    ):
        assert translate(text).count("\n") == text.count("\n")
    assert translate('auto s = "// <<<"; // x') == 'auto s = "// <<<";  '
    assert "comment" not in translate("// comment")
    assert "(ok ? f<1> : g)(arguments...)" in translate("return (ok ? f<1> : g)<<<1, 1>>>(x);")


@NEEDS_COMPILER
@pytest.mark.slow
def test_what_kernels_can_use(tmp_path: Path) -> None:
    """Warps, shared memory, atomics, constants, vectors, blocks of three dimensions: the right numbers, no alarm."""
    done = run(ops(tmp_path / "ops", MANY), CHECK + RIGHT, sanitize=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all right") == 2 and done.stderr == ""


LAUNCH = """
void launch(const float* x, float* out, int64_t rows, int64_t columns, int64_t) {
  kernel<<<rows, columns>>>(x, out);
}
"""
BRANCH = """
__global__ void kernel(const float* x, float* out) {
  if (threadIdx.x < 40) {
    __syncthreads();  // one
  } else {
    __syncthreads();  // other
  }
  out[0] = 0;
}
"""
SPIN = """
__global__ void kernel(const float* x, float* out) {
  if (threadIdx.x == 0) {
    while (atomicAdd(out, 0.f) != 1.f) {
    }
  }
}
"""
BLOCKS = """
__global__ void kernel(const float* x, float* out) {
  __shared__ float first;
  if (threadIdx.x == 0) first = x[blockIdx.x * blockDim.x];
  __syncthreads();
  if (threadIdx.x == 0) out[0] += first;
}
"""


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "line", "words"),
    [
        (BRANCH, "__syncthreads();  // one", "threads wait here for others of their block, which wait at"),
        (SPIN, "while (atomicAdd", "a thread waits in a loop for another"),
        pytest.param(BLOCKS, "out[0] += first", "ThreadSanitizer: data race", marks=pytest.mark.full),
    ],
    ids=["branch", "spin", "blocks"],
)
def test_what_a_gpu_would_hide(tmp_path: Path, kernel: str, line: str, words: str) -> None:
    """A barrier in a branch, a loop that waits, two blocks that write to one element: each with its line."""
    done = run(ops(tmp_path / "ops", kernel + LAUNCH), CHECK + "f(x, 0)", sanitize=kernel == BLOCKS)
    assert done.returncode == 1
    assert words in done.stderr and f"f.cu:{line_of(kernel, line)}:" in done.stderr, done.stderr
    assert "block" in done.stderr and "Traceback" not in done.stderr


@NEEDS_COMPILER
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("#include <cooperative_groups.h>", "cooperative_groups.h"),
        pytest.param("#include <cublas_v2.h>", "cublas_v2.h", marks=pytest.mark.full),
        pytest.param("#include <cuda_fp16.h>", "cuda_fp16.h", marks=pytest.mark.full),
        ("__global__ void k(float* x) { x[0] = tex2D<float>(0, 0, 0); }", "tex2D"),
        pytest.param(
            "__global__ void k(float* x) { x[0] = __shfl_down(x[0], 1); }", "__shfl_down", marks=pytest.mark.full
        ),
        ("void f(float* x) { cudaMalloc(&x, 4); }", "cudaMalloc"),
        ('__device__ void f() { asm volatile("nop;"); }', "asm"),
    ],
)
def test_what_they_cannot_use(tmp_path: Path, text: str, name: str) -> None:
    """Named, with the line."""
    kernel = f"// asm\n{text}\n"
    folder = ops(tmp_path / "ops", kernel, tail="")
    with pytest.raises(BuildError) as caught:
        build(folder)
    assert f"f.cu:{line_of(kernel, text)}:" in str(caught.value)
    assert f"{name}: a typing error, or a part of CUDA" in str(caught.value) or name == "asm"
