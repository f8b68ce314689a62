// An emulated accelerator for PyTorch. Device memory is host memory and kernels are those of the CPU, so results are
// the CPU's to the bit; but all that makes a device hard to use is kept: work is late, memory is poisoned, devices do
// not mix.
#include <ATen/autocast_mode.h>

#include "operators.h"

namespace emulated {

REGISTER_ALLOCATOR(KIND, &device_memory);
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, module) {
  module.impl("empty.memory_format", &empty);
  module.impl("empty_strided", &empty_strided);
  module.impl("as_strided", &as_strided);
  module.impl("view", &view);
  module.impl("_reshape_alias", &reshape_alias);
  module.impl("set_.source_Storage_storage_offset", &set_strided);
  module.impl("set_.source_Storage", &set_storage);
  module.impl("set_.source_Tensor", &set_tensor);
  module.impl("resize_", &resize);
  module.impl("unfold", TORCH_FN(at::native::unfold));
  module.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  module.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  module.impl("record_stream", &record_stream);
  module.impl("_copy_from", &copy_from);
  module.impl("_copy_from_and_resize", &copy_and_resize);
  module.impl("_local_scalar_dense", &item);
  module.impl("convolution_overrideable", &convolution);
  module.impl("convolution_backward_overrideable", &convolution_backward);
  module.impl("native_dropout", &native_dropout);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, module) { module.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace emulated

// Autocast casts what it casts on CUDA.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, module) { module.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at;  // the macros name what is in there
  using namespace at::autocast;
#define LOW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FULL_SET(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define NORM(...) KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE(__VA_ARGS__)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOW)
  AT_FORALL_FP32(FULL)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_SET)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(NORM)
  AT_FORALL_PROMOTE(WIDEST)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(new emulated::Hooks());
  module.def("is_forked", [] { return emulated::is_forked; });
  module.def("on_wait", [](py::object function) { emulated::on_wait = new py::object(function); });
  module.def("queued", [](int device) { return emulated::current_stream(device).queued(); });
  module.def("generator", [](int device) { return emulated::generator(device); });
}
