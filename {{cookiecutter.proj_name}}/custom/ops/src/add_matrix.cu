// add_matrix on the GPU: out[i][j] = a[i][j] + b[i][j], one thread per element, on a two-dimensional grid.
#include <torch/headeronly/core/TensorAccessor.h>

#include "launch.cuh"

namespace {

using ops::Tensor;

// A matrix argument of a kernel: pointer, sizes and strides in one value, copied to the GPU with the other arguments.
// x[i][j] works for any strides, so a transposed or sliced input needs no copy. __restrict__ promises that memory read
// through one argument is not written through another; add_matrix(a, a) keeps this promise.
template <typename scalar_t>
using Matrix =
    torch::headeronly::HeaderOnlyGenericPackedTensorAccessor<scalar_t, 2, torch::headeronly::RestrictPtrTraits>;

template <typename scalar_t>
__global__ void add_matrix_kernel(const Matrix<const scalar_t> a, const Matrix<const scalar_t> b,
                                  Matrix<scalar_t> out) {
  using compute_t = ops::compute_t<scalar_t>;
  // int64_t before the product: 32 bits overflow at 2^31 elements. x runs along a row, so that the 32 threads of a
  // warp read 32 neighbouring elements.
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row_stride = static_cast<int64_t>(gridDim.y) * blockDim.y;
  const int64_t column_stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = first_row; i < out.size(0); i += row_stride) {
    for (int64_t j = first_column; j < out.size(1); j += column_stride) {
      out[i][j] = static_cast<scalar_t>(static_cast<compute_t>(a[i][j]) + static_cast<compute_t>(b[i][j]));
    }
  }
}

template <typename scalar_t>
void launch(const Tensor& a, const Tensor& b, Tensor& out) {
  const dim3 threads(32, 8);
  const auto blocks = [](int64_t elements, int64_t per_block) {
    return static_cast<unsigned>(std::min<int64_t>((elements + per_block - 1) / per_block, 65535));  // limit of grid.y
  };
  const dim3 grid(blocks(a.size(1), threads.x), blocks(a.size(0), threads.y));
  add_matrix_kernel<scalar_t><<<grid, threads, 0, ops::current_stream(a)>>>(
      Matrix<const scalar_t>(a.const_data_ptr<scalar_t>(), a.sizes().data(), a.strides().data()),
      Matrix<const scalar_t>(b.const_data_ptr<scalar_t>(), b.sizes().data(), b.strides().data()),
      Matrix<scalar_t>(out.mutable_data_ptr<scalar_t>(), out.sizes().data(), out.strides().data()));
}

Tensor add_matrix(const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.dim() == 2, "add_matrix: a and b must be matrices");
  ops::check_alike("add_matrix", a, b);
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  Tensor out = torch::stable::new_empty(a, a.sizes());
  if (out.numel() == 0) return out;  // a grid of no blocks is an error
  DISPATCH_FLOATING(a.scalar_type(), "add_matrix", [&] { launch<scalar_t>(a, b, out); });
  ops::check_launch("add_matrix");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(custom_ops, CUDA, m) { m.impl("add_matrix", TORCH_BOX(&add_matrix)); }
