// Code shared by all operators, on the CPU and on the GPU.
//
// The code is written against PyTorch's stable ABI (torch/csrc/stable, torch/headeronly): it compiles in seconds
// instead of half a minute, and its CUDA part builds and links even if PyTorch itself was built without CUDA.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/Dispatch_v2.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

// Runs `...` with `scalar_t` as the C++ type of `dtype`. A comma outside of () would end the macro's argument, so put
// the work into a template function and pass a single call of it.
#define DISPATCH_FLOATING(dtype, name, ...)                                                      \
  THO_DISPATCH_V2(dtype, name, AT_WRAP(__VA_ARGS__), torch::headeronly::ScalarType::Half,        \
                  torch::headeronly::ScalarType::BFloat16, torch::headeronly::ScalarType::Float, \
                  torch::headeronly::ScalarType::Double)

namespace ops {

using torch::stable::Tensor;

// The type to compute in: half precision is for storage; computing in it would lose digits without need.
template <typename scalar_t>
using compute_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

inline bool same_sizes(const Tensor& a, const Tensor& b) {
  const auto x = a.sizes(), y = b.sizes();
  return std::equal(x.begin(), x.end(), y.begin(), y.end());
}

// What a kernel with two inputs relies on; without it, it would read outside of one of them.
inline void check_alike(const char* name, const Tensor& a, const Tensor& b) {
  STD_TORCH_CHECK(same_sizes(a, b), name, ": both tensors must have one size");
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), name, ": both tensors must have one dtype");
  STD_TORCH_CHECK(a.get_device_index() == b.get_device_index(), name, ": both tensors must be on one device");
}

// `tensor` with the strides of `layout`, copied only if they differ. `layout` comes from empty_like, so it has no gaps:
// both are then plain arrays with their elements in the same order, whatever that order is (channels_last is kept).
inline Tensor in_layout_of(const Tensor& tensor, const Tensor& layout) {
  const auto have = tensor.strides(), want = layout.strides();
  if (std::equal(have.begin(), have.end(), want.begin(), want.end())) return tensor;
  Tensor copy = torch::stable::empty_like(layout);
  torch::stable::copy_(copy, tensor);
  return copy;
}

}  // namespace ops
