// How a kernel is launched: on the tensor's GPU, on PyTorch's current stream, with an error that names the operator.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "kernels.h"

namespace ops {

constexpr int kThreads = 256;  // per block: a multiple of the 32 that run in step

// Enough blocks for one element per thread, up to what keeps every GPU busy; the grid-stride loop in the kernel does
// the rest.
inline int blocks_for(int64_t elements) {
  return static_cast<int>(std::min<int64_t>((elements + kThreads - 1) / kThreads, 65535));
}

// The stream that PyTorch's own kernels run on now: work on another one would not wait for the input to be ready.
inline cudaStream_t current_stream(const Tensor& tensor) {
  const auto stream = torch::stable::accelerator::getCurrentStream(tensor.get_device_index());
  return static_cast<cudaStream_t>(stream.nativeHandle());
}

// A launch returns nothing: a bad grid or a missing architecture is only found by asking. What goes wrong while the
// kernel runs shows later, at the next synchronisation; CUDA_LAUNCH_BLOCKING=1 brings it back to here.
inline void check_launch(const char* name) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, name, ": the CUDA kernel could not be launched: ", cudaGetErrorString(error));
}

}  // namespace ops
