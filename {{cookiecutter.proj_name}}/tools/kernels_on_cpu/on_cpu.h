// The part of CUDA that kernels run on without a GPU. on_cpu.py compiles each .cu file with this header included first;
// README.md of the operators says which parts of CUDA there are. The blocks of a launch run one after the other. The
// threads of a block take turns: each runs until it waits for others or returns (on_cpu.cpp).
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

// In place of torch/csrc/stable/accelerator.h: one device, one stream.
namespace torch::stable::accelerator {
using DeviceIndex = int32_t;
struct DeviceGuard {
  explicit DeviceGuard(DeviceIndex) {}
};
struct Stream {
  void* nativeHandle() const { return nullptr; }
};
inline Stream getCurrentStream(DeviceIndex) { return {}; }
inline DeviceIndex getCurrentDeviceIndex() { return 0; }
}  // namespace torch::stable::accelerator

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <type_traits>
#define __CUDACC__  // the accessors that a kernel can have as arguments
#include <torch/headeronly/core/TensorAccessor.h>
#undef __CUDACC__

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __managed__
#define __noinline__ __attribute__((noinline))
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;
constexpr int warpSize = 32;

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9 };
cudaError_t cudaGetLastError();
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "invalid configuration argument";
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t = nullptr) {
  memset(to, value, bytes);
  return cudaSuccess;
}
template <typename T>
cudaError_t cudaMemcpyToSymbol(T& to, const void* from, size_t bytes) {
  memcpy(&to, from, bytes);
  return cudaSuccess;
}

namespace on_cpu {

// Calls thread(call) once for each thread of the grid; a grid that a GPU refuses is an error for cudaGetLastError.
void run(dim3 grid, dim3 block, size_t shared_bytes, void (*thread)(const void*), const void* call);
void sync_block(const char* file, int line);
void sync_warp(unsigned lanes, const char* file, int line);
// The value that the thread with number `lane` of this warp gives; to all `lanes` that take part. No barrier for
// memory.
uint64_t exchange(unsigned lanes, uint64_t value, unsigned lane, const char* file, int line);
unsigned ballot(unsigned lanes, bool value, const char* file, int line);
void* shared(const void* key, size_t bytes);  // the block's memory with this key
extern void* dynamic_shared;                  // of the block that runs; its size comes with the launch
void spin(const char* file, int line);        // ends the program where a thread does nothing but ask an atomic

// kernel<<<grid, block, shared_bytes, stream>>>(arguments...) is translated to launch(kernel, ...)(arguments...).
template <typename Kernel>
auto launch(Kernel kernel, dim3 grid, dim3 block, size_t shared_bytes = 0, cudaStream_t = nullptr) {
  return [=](auto... arguments) {
    const auto call = [&] { kernel(arguments...); };
    run(grid, block, shared_bytes, [](const void* each) { (*static_cast<decltype(call)*>(each))(); }, &call);
  };
}

// __shared__ float x[8]; is translated to a reference to what this returns.
template <typename T>
T& shared_as(const void* key) {
  return *static_cast<T*>(shared(key, sizeof(T)));
}

template <typename T>
T shuffle(unsigned lanes, T value, unsigned lane, const char* file, int line) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a shuffle moves at most 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof(T));
  bits = exchange(lanes, bits, lane, file, line);
  memcpy(&value, &bits, sizeof(T));
  return value;
}

template <typename T, typename Update>
T atomic(T* at, Update update, const char* file, int line) {
  spin(file, line);
  std::atomic_ref<T> value(*at);
  T old = value.load();
  while (!value.compare_exchange_weak(old, update(old))) {
  }
  return old;
}

inline unsigned lane() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % warpSize; }

}  // namespace on_cpu

#define ON_CPU_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
inline void __syncthreads(ON_CPU_CALLER) { on_cpu::sync_block(file, line); }
inline void __syncwarp(unsigned lanes = ~0u, ON_CPU_CALLER) { on_cpu::sync_warp(lanes, file, line); }
inline unsigned __ballot_sync(unsigned lanes, bool value, ON_CPU_CALLER) {
  return on_cpu::ballot(lanes, value, file, line);
}
inline bool __any_sync(unsigned lanes, bool value, ON_CPU_CALLER) {
  return on_cpu::ballot(lanes, value, file, line) != 0;
}
inline bool __all_sync(unsigned lanes, bool value, ON_CPU_CALLER) {
  return on_cpu::ballot(lanes, !value, file, line) == 0;
}
// `width` divides the warp into parts of that many threads; a thread whose source lies outside of its part keeps its
// own.
template <typename T>
T __shfl_sync(unsigned lanes, T value, int from, int width = warpSize, ON_CPU_CALLER) {
  const unsigned first = on_cpu::lane() / width * width;
  return on_cpu::shuffle(lanes, value, first + from % width, file, line);
}
template <typename T>
T __shfl_xor_sync(unsigned lanes, T value, int bits, int width = warpSize, ON_CPU_CALLER) {
  const unsigned lane = on_cpu::lane(), from = lane ^ bits;
  return on_cpu::shuffle(lanes, value, from < lane / width * width + width ? from : lane, file, line);
}
template <typename T>
T __shfl_down_sync(unsigned lanes, T value, unsigned by, int width = warpSize, ON_CPU_CALLER) {
  const unsigned lane = on_cpu::lane();
  return on_cpu::shuffle(lanes, value, lane % width + by < width ? lane + by : lane, file, line);
}
template <typename T>
T __shfl_up_sync(unsigned lanes, T value, unsigned by, int width = warpSize, ON_CPU_CALLER) {
  const unsigned lane = on_cpu::lane();
  return on_cpu::shuffle(lanes, value, lane % width >= by ? lane - by : lane, file, line);
}

// Atomics order all memory here, so a missing fence is not noticed.
inline void __threadfence() {}
inline void __threadfence_block() {}
#define ON_CPU_ATOMIC(name, result)                                                       \
  template <typename T>                                                                   \
  T name(T* at, std::type_identity_t<T> value, ON_CPU_CALLER) {                           \
    return on_cpu::atomic(at, [=](T old) { return static_cast<T>(result); }, file, line); \
  }
ON_CPU_ATOMIC(atomicAdd, old + value)
ON_CPU_ATOMIC(atomicSub, old - value)
ON_CPU_ATOMIC(atomicExch, value)
ON_CPU_ATOMIC(atomicMin, value < old ? value : old)
ON_CPU_ATOMIC(atomicMax, value > old ? value : old)
ON_CPU_ATOMIC(atomicAnd, old& value)
ON_CPU_ATOMIC(atomicOr, old | value)
ON_CPU_ATOMIC(atomicXor, old ^ value)
ON_CPU_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
ON_CPU_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
template <typename T>
T atomicCAS(T* at, std::type_identity_t<T> expected, std::type_identity_t<T> value, ON_CPU_CALLER) {
  return on_cpu::atomic(at, [=](T old) { return old == expected ? value : old; }, file, line);
}

// Numbers, as CUDA's mathematics names them.
template <typename A, typename B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <typename A, typename B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
inline float rsqrt(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <typename T>
T __ldg(const T* at) {
  return *at;
}

// float2, make_float2 and so on.
#define ON_CPU_VECTORS(type, prefix)                                                       \
  struct alignas(2 * sizeof(type)) prefix##2 { type x, y; };                               \
  struct prefix##3 { type x, y, z; };                                                      \
  struct alignas(sizeof(type) < 4 ? 4 * sizeof(type) : 16) prefix##4 { type x, y, z, w; }; \
  inline prefix##2 make_##prefix##2(type x, type y) { return {x, y}; }                     \
  inline prefix##3 make_##prefix##3(type x, type y, type z) { return {x, y, z}; }          \
  inline prefix##4 make_##prefix##4(type x, type y, type z, type w) { return {x, y, z, w}; }
ON_CPU_VECTORS(float, float)
ON_CPU_VECTORS(double, double)
ON_CPU_VECTORS(int, int)
