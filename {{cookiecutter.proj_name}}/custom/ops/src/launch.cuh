// Launching kernels: on the tensor's GPU, on PyTorch's current stream, with an error that names the operator.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>

#include "kernels.h"

namespace ops {

constexpr int kThreads = 256;  // per block: a multiple of the warp size, 32

// One thread per element, up to a number of blocks that keeps any GPU busy; the grid-stride loop in the kernel handles
// the rest.
inline int blocks_for(int64_t elements) {
  return static_cast<int>(std::min<int64_t>((elements + kThreads - 1) / kThreads, 65535));
}

// The stream of PyTorch's own kernels: work on another stream would not wait until the input is ready.
inline cudaStream_t current_stream(const Tensor& tensor) {
  const auto stream = torch::stable::accelerator::getCurrentStream(tensor.get_device_index());
  return static_cast<cudaStream_t>(stream.nativeHandle());
}

// A launch returns no error: a bad grid or a missing architecture must be queried. An error while the kernel runs is
// reported at the next synchronisation; with CUDA_LAUNCH_BLOCKING=1, it is reported here.
inline void check_launch(const char* name) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, name, ": the CUDA kernel could not be launched: ", cudaGetErrorString(error));
}

}  // namespace ops
