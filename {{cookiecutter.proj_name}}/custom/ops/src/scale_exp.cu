// scale_exp on the GPU, forward and backward.
//
// Each is one kernel. Eager PyTorch needs four for s * exp(-x) + b, and each of them reads and writes the whole tensor,
// which takes longer than the arithmetic. For the same reason, the backward kernel recomputes exp(-x): reading a saved
// copy would take more time than the function, and extra memory.
#include "launch.cuh"

namespace {

using ops::Tensor;

// Grid-stride loop: thread k takes the elements k, k + number of threads, k + 2 * number of threads, and so on. This
// works for any number of blocks, and neighbouring threads always read neighbouring elements.
template <typename scalar_t>
__global__ void scale_exp_kernel(const scalar_t* __restrict__ x, scalar_t* __restrict__ out,
                                 ops::compute_t<scalar_t> scale, ops::compute_t<scalar_t> shift, int64_t count) {
  using compute_t = ops::compute_t<scalar_t>;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    out[i] = static_cast<scalar_t>(scale * exp(-static_cast<compute_t>(x[i])) + shift);
  }
}

template <typename scalar_t>
__global__ void scale_exp_backward_kernel(const scalar_t* __restrict__ grad, const scalar_t* __restrict__ x,
                                          scalar_t* __restrict__ out, ops::compute_t<scalar_t> scale, int64_t count) {
  using compute_t = ops::compute_t<scalar_t>;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += stride) {
    out[i] = static_cast<scalar_t>(-scale * exp(-static_cast<compute_t>(x[i])) * static_cast<compute_t>(grad[i]));
  }
}

template <typename scalar_t>
void launch(const Tensor& x, Tensor& out, double scale, double shift) {
  scale_exp_kernel<scalar_t><<<ops::blocks_for(x.numel()), ops::kThreads, 0, ops::current_stream(x)>>>(
      x.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(), scale, shift, x.numel());
}

template <typename scalar_t>
void launch_backward(const Tensor& grad, const Tensor& x, Tensor& out, double scale) {
  scale_exp_backward_kernel<scalar_t><<<ops::blocks_for(x.numel()), ops::kThreads, 0, ops::current_stream(x)>>>(
      grad.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(), scale,
      x.numel());
}

Tensor scale_exp(const Tensor& input, double scale, double shift) {
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  Tensor out = torch::stable::empty_like(input);
  if (out.numel() == 0) return out;  // a grid of no blocks is an error
  const Tensor x = ops::in_layout_of(input, out);
  DISPATCH_FLOATING(x.scalar_type(), "scale_exp", [&] { launch<scalar_t>(x, out, scale, shift); });
  ops::check_launch("scale_exp");
  return out;
}

Tensor scale_exp_backward(const Tensor& grad_output, const Tensor& input, double scale) {
  ops::check_alike("scale_exp_backward", grad_output, input);
  const torch::stable::accelerator::DeviceGuard guard(input.get_device_index());
  Tensor out = torch::stable::empty_like(input);
  if (out.numel() == 0) return out;
  const Tensor x = ops::in_layout_of(input, out), grad = ops::in_layout_of(grad_output, out);
  DISPATCH_FLOATING(x.scalar_type(), "scale_exp_backward", [&] { launch_backward<scalar_t>(grad, x, out, scale); });
  ops::check_launch("scale_exp_backward");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(custom_ops, CUDA, m) {
  m.impl("scale_exp", TORCH_BOX(&scale_exp));
  m.impl("scale_exp_backward", TORCH_BOX(&scale_exp_backward));
}
