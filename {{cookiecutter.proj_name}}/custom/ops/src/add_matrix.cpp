// add_matrix on the CPU: out[i][j] = a[i][j] + b[i][j]
#include "kernels.h"

namespace {

using ops::Tensor;

template <typename scalar_t>
void run(const Tensor& a, const Tensor& b, Tensor& out) {
  using compute_t = ops::compute_t<scalar_t>;
  const scalar_t* x = a.const_data_ptr<scalar_t>();
  const scalar_t* y = b.const_data_ptr<scalar_t>();
  scalar_t* sum = out.mutable_data_ptr<scalar_t>();
  // On PyTorch's threads, with at least 32768 elements per thread: waking one for fewer does not pay off.
  torch::stable::parallel_for(0, out.numel(), 32768, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      sum[i] = static_cast<scalar_t>(static_cast<compute_t>(x[i]) + static_cast<compute_t>(y[i]));
    }
  });
}

Tensor add_matrix(const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(a.dim() == 2, "add_matrix: a and b must be matrices");
  ops::check_alike("add_matrix", a, b);
  // Contiguous inputs, copied if necessary, so that the loop runs over plain arrays.
  const Tensor x = torch::stable::contiguous(a), y = torch::stable::contiguous(b);
  Tensor out = torch::stable::empty_like(x);
  DISPATCH_FLOATING(a.scalar_type(), "add_matrix", [&] { run<scalar_t>(x, y, out); });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(custom_ops, CPU, m) { m.impl("add_matrix", TORCH_BOX(&add_matrix)); }
