// Tensors of an emulated device: how they are made, viewed and copied.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>

#include "device.h"

namespace emulated {

using at::IntArrayRef;
using at::Tensor;

inline bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == KIND; }

// The same memory as a tensor of the CPU, for a kernel. It does not keep the memory alive: nor does a real launch.
inline Tensor bare(const Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  auto same = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) same.unsafeGetTensorImpl()->set_wrapped_number(true);
  return same;
}

// Page-locked memory without a claim on it.
inline Tensor borrowed(const Tensor& tensor) {
  auto options = tensor.options().requires_grad(false).pinned_memory(false);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), options);
}

// ---- Making

struct OnDevice {
  DeviceIndex before = current_device;
  explicit OnDevice(std::optional<at::Device> device) {
    if (device && device->has_index()) Guard().setDevice(*device);
  }
  ~OnDevice() { current_device = before; }
};

inline const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

inline Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(device);
  return at::detail::empty_generic(size, &device_memory, KEYS, c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(size, stride, &device_memory, KEYS, c10::dtype_or_default(dtype));
}

inline Tensor empty_like(const Tensor& tensor, DeviceIndex device) {
  if (!tensor.defined()) return tensor;
  return empty_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, at::Device(KIND, device), {});
}

// ---- Views

inline Tensor as_strided(const Tensor& tensor, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}
inline Tensor view(const Tensor& tensor, IntArrayRef size) { return at::native::view(tensor, size); }
inline Tensor reshape_alias(const Tensor& tensor, IntArrayRef size, IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, tensor.storage_offset());
}
inline Tensor& set_strided(Tensor& tensor, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  return tensor;
}
inline Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  int64_t count = storage.nbytes() / tensor.itemsize();
  int64_t one = 1;
  return set_strided(tensor, storage, 0, {&count, 1}, {&one, 1});
}
inline Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_strided(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
inline const Tensor& resize(const Tensor& tensor, IntArrayRef size, std::optional<at::MemoryFormat>) {
  int64_t bytes = (c10::multiply_integers(size) + tensor.storage_offset()) * tensor.itemsize();
  if (static_cast<int64_t>(tensor.storage().nbytes()) < bytes) Hooks().resizePrivateUse1Bytes(tensor.storage(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return tensor;
}
inline void record_stream(Tensor& tensor, c10::Stream by) {
  device_memory.recordStream(tensor.storage().data_ptr(), by);
}

// ---- Copies

inline void copy_between(const Tensor& from, const Tensor& to) {
  auto& source = current_stream(from.device().index());
  auto& target = current_stream(to.device().index());
  if (&source == &target) {
    target.push([from = bare(from), to = bare(to)] { to.copy_(from); });
    return;
  }
  auto written = source.push([] {});
  auto read = target.push([&source, written, from = bare(from), to = bare(to)] {
    source.until(written);
    to.copy_(from);
  });
  source.push([&target, read] { target.until(read); });  // only then may its memory be freed
}

inline void copy_here(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto& queue = current_stream(to.device().index());
  if (non_blocking && PinnedMemory::keep_for(from.storage().data(), &queue)) {
    queue.push([from = borrowed(from), to = bare(to)] { to.copy_(from); });  // read when the work runs
    return;
  }
  queue.push([from = from.detach().clone(), to = bare(to)] { to.copy_(from); });
  if (!non_blocking) wait_for(queue, "copy to the device");
}

inline void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  auto& queue = current_stream(from.device().index());
  if (non_blocking && PinnedMemory::keep_for(to.storage().data(), &queue)) {
    if (is_lazy && to.is_non_overlapping_and_dense()) memset(to.data_ptr(), UNWRITTEN, to.nbytes());
    queue.push([from = bare(from), to = borrowed(to)] { to.copy_(from); });
    return;
  }
  wait_for(queue, "copy to the host");
  at::AutoDispatchBelowADInplaceOrView below;
  to.copy_(bare(from));
}

inline Tensor copy_from(const Tensor& source, const Tensor& to, bool non_blocking) {
  auto from = source.sizes() == to.sizes() ? source : source.expand(to.sizes());
  if (to.numel() == 0) return to;
  check((is_here(to) ? to : from).device().index());
  if (is_here(from) && is_here(to))
    copy_between(from, to);
  else if (is_here(to))
    copy_here(from, to, non_blocking);
  else
    copy_to_host(from, to, non_blocking);
  return to;
}

inline Tensor copy_and_resize(const Tensor& from, const Tensor& to) {
  if (is_here(to))
    emulated::resize(to, from.sizes(), std::nullopt);
  else
    to.resize_(from.sizes());
  return copy_from(from, to, false);
}

inline at::Scalar item(const Tensor& tensor) {
  auto device = tensor.device().index();
  check(device);
  wait_for(current_stream(device), "item");
  return bare(tensor).item();
}

}  // namespace emulated
