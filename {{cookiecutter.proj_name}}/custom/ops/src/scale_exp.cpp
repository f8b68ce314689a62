// scale_exp on the CPU, forward and backward, each in one pass over the memory.
#include <cmath>

#include "kernels.h"

// exp of a whole vector register at a time. glibc has it, but declares it only for -ffast-math, which would break NaN
// and infinity; so it is declared here. One version per kind of processor is compiled, and the right one is chosen when
// the library is loaded. Otherwise, this is a plain loop: correct, but several times slower.
#if defined(__GLIBC__) && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
extern "C" __attribute__((simd("notinbranch"))) float expf(float) noexcept;
extern "C" __attribute__((simd("notinbranch"))) double exp(double) noexcept;
#define FOR_EACH_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif

namespace {

using ops::Tensor;

inline float exp_of(float x) { return expf(x); }
inline double exp_of(double x) { return exp(x); }

// Calls finish(i, exp(-x[i])) for each i from begin to end, in blocks that stay in the L1 cache. The three loops are
// separate so that exp uses whole registers even if the conversion from half precision does not.
template <typename scalar_t, typename Finish>
FOR_EACH_PROCESSOR void exp_range(const scalar_t* x, int64_t begin, int64_t end, Finish finish) {
  constexpr int64_t kBlock = 512;
  ops::compute_t<scalar_t> values[kBlock];
  for (int64_t start = begin; start < end; start += kBlock) {
    const int64_t count = std::min(kBlock, end - start);
    for (int64_t i = 0; i < count; ++i) values[i] = -static_cast<ops::compute_t<scalar_t>>(x[start + i]);
    for (int64_t i = 0; i < count; ++i) values[i] = exp_of(values[i]);
    for (int64_t i = 0; i < count; ++i) finish(start + i, values[i]);
  }
}

// The same for all elements, on PyTorch's threads.
template <typename scalar_t, typename Finish>
void for_each_exp(const Tensor& x, const Finish& finish) {
  const scalar_t* data = x.const_data_ptr<scalar_t>();
  torch::stable::parallel_for(0, x.numel(), 16384,
                              [&](int64_t begin, int64_t end) { exp_range(data, begin, end, finish); });
}

template <typename scalar_t>
void run(const Tensor& x, Tensor& out, ops::compute_t<scalar_t> scale, ops::compute_t<scalar_t> shift) {
  scalar_t* result = out.mutable_data_ptr<scalar_t>();
  for_each_exp<scalar_t>(x, [=](int64_t i, auto e) { result[i] = static_cast<scalar_t>(scale * e + shift); });
}

template <typename scalar_t>
void run_backward(const Tensor& grad_output, const Tensor& x, Tensor& out, ops::compute_t<scalar_t> scale) {
  const scalar_t* grad = grad_output.const_data_ptr<scalar_t>();
  scalar_t* result = out.mutable_data_ptr<scalar_t>();
  for_each_exp<scalar_t>(
      x, [=](int64_t i, auto e) { result[i] = static_cast<scalar_t>(-scale * e * static_cast<decltype(e)>(grad[i])); });
}

Tensor scale_exp(const Tensor& input, double scale, double shift) {
  Tensor out = torch::stable::empty_like(input);
  const Tensor x = ops::in_layout_of(input, out);
  DISPATCH_FLOATING(x.scalar_type(), "scale_exp", [&] { run<scalar_t>(x, out, scale, shift); });
  return out;
}

Tensor scale_exp_backward(const Tensor& grad_output, const Tensor& input, double scale) {
  ops::check_alike("scale_exp_backward", grad_output, input);
  Tensor out = torch::stable::empty_like(input);
  const Tensor x = ops::in_layout_of(input, out), grad = ops::in_layout_of(grad_output, out);
  DISPATCH_FLOATING(x.scalar_type(), "scale_exp_backward", [&] { run_backward<scalar_t>(grad, x, out, scale); });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(custom_ops, CPU, m) {
  m.impl("scale_exp", TORCH_BOX(&scale_exp));
  m.impl("scale_exp_backward", TORCH_BOX(&scale_exp_backward));
}
