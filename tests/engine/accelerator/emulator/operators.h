// Any operator: the CPU's kernel, on the same memory, later. The operator's meta kernel says what its results look
// like.
#pragma once

#include "tensors.h"

namespace emulated {

using c10::IValue;
using torch::jit::Stack;

template <class Function>
IValue map_tensors(const IValue& value, const Function& function) {
  if (value.isTensor()) return function(value.toTensor());
  if (value.isTensorList()) {
    std::vector<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorList()) mapped.push_back(function(tensor));
    return mapped;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> mapped;
    for (std::optional<Tensor> tensor : value.toOptionalTensorList())
      mapped.push_back(tensor ? std::optional<Tensor>(function(*tensor)) : tensor);
    return mapped;
  }
  return value;
}

inline bool starts_with(const std::string& text, const char* beginning) { return text.rfind(beginning, 0) == 0; }

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), count_(schema_.arguments().size()), stack_(stack) {
    arguments_.assign(stack->end() - count_, stack->end());
    is_out_ = schema_.overload_name().find("out") != std::string::npos;
    device_ = find_device();
  }

  void run() {
    check(device_);
    take_arguments();
    find_written();
    bool is_known = (aliases_ && !is_out_) || find_shapes();
    if (is_known)
      queue();
    else
      run_now();
    stack_->erase(stack_->end() - count_, stack_->end());
    for (auto& result : results_) stack_->push_back(std::move(result));
  }

 private:
  // The device of the tensors, which must be one; scalars and indices may be on the host, as for CUDA.
  DeviceIndex find_device() {
    const auto& name = schema_.name();
    bool takes_lists = name.find("cat") != std::string::npos || name == "aten::stack";
    bool takes_indices = starts_with(name, "aten::index") || starts_with(name, "aten::_index_put");
    std::optional<at::Device> found, asked;
    bool is_mixed = false;
    for (auto& argument : arguments_) {
      if (argument.isDevice()) asked = argument.toDevice();
      map_tensors(argument, [&](const Tensor& tensor) {
        if (is_here(tensor)) {
          TORCH_CHECK(!found || *found == tensor.device(), mixed(), *found, " and ", tensor.device(), "! (", name, ")");
          found = tensor.device();
        } else if (tensor.defined() && (tensor.dim() || takes_lists)) {
          is_mixed |= !(takes_indices && !tensor.is_floating_point());
        }
        return tensor;
      });
    }
    TORCH_CHECK(!(found && is_mixed), mixed(), *found, " and cpu! (", name, ")");
    if (found) return found->index();
    return asked && asked->has_index() ? asked->index() : current_device;
  }

  static const char* mixed() {
    return "Expected all tensors to be on the same device, but found at least two devices, ";
  }

  // The arguments as the CPU's kernel gets them. What lies on the host is read now, as by a launch.
  void take_arguments() {
    for (size_t place = 0; place < count_; ++place) {
      const auto& given = arguments_[place];
      if (is_generator(place)) {
        auto own = given.isNone() ? std::nullopt : std::optional<at::Generator>(given.toGenerator());
        host_.push_back(next_generator(own, device_));
      } else if (given.isDevice()) {
        host_.push_back(at::Device(at::kCPU));
      } else {
        host_.push_back(map_tensors(given, [](const Tensor& tensor) {
          return is_here(tensor) || !tensor.defined() ? bare(tensor) : tensor.detach().clone();
        }));
      }
      if (given.isTensor() && given.toTensor().defined() && given.toTensor().unsafeGetTensorImpl()->is_wrapped_number())
        host_[place].toTensor().unsafeGetTensorImpl()->set_wrapped_number(true);
    }
  }

  bool is_generator(size_t place) const {
    auto type = schema_.arguments()[place].type();
    if (type->kind() == c10::TypeKind::OptionalType) type = type->castRaw<c10::OptionalType>()->getElementType();
    return type->kind() == c10::TypeKind::GeneratorType;
  }

  // Results that are arguments: those of operators that write to them.
  void find_written() {
    aliases_ = !schema_.returns().empty();
    for (const auto& returned : schema_.returns()) {
      if (!returned.alias_info()) {
        aliases_ = false;
        return;
      }
      for (size_t place = 0; place < count_; ++place) {
        auto* about = schema_.arguments()[place].alias_info();
        if (about && about->isWrite() && *about == *returned.alias_info()) results_.push_back(arguments_[place]);
      }
    }
  }

  // Make room for the results. Returns false where only the values tell their shapes (nonzero, unique, equal).
  bool find_shapes() {
    try {
      c10::impl::ExcludeDispatchKeyGuard no_cast(c10::autocast_dispatch_keyset);
      c10::impl::ExcludeDispatchKeyGuard no_mode(
          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
      Stack shapes;
      for (size_t place = 0; place < count_; ++place) shapes.push_back(shape_of(place));
      Stack found = shapes;
      if (schema_.returns().size() || !is_out_) op_.callBoxed(&found);
      if (aliases_) return resize_outputs(shapes);
      for (auto& result : found) {
        if (!result.isTensor() && !result.isTensorList()) return false;
        results_.push_back(map_tensors(result, [&](const Tensor& shape) {
          made_.push_back(empty_like(shape, device_));
          return made_.back();
        }));
      }
      return true;
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const std::exception& error) {
      if (getenv("EMU_DEBUG")) fprintf(stderr, "emu: no shape of %s: %s\n", schema_.name().c_str(), error.what());
      return false;
    }
  }

  IValue shape_of(size_t place) const {
    if (arguments_[place].isDevice()) return at::Device(at::kMeta);
    if (host_[place].isGenerator()) return IValue();
    return map_tensors(arguments_[place], [](const Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      if (!is_here(tensor) && !tensor.dim()) return tensor.detach();
      auto options = tensor.options().device(at::kMeta).requires_grad(false).pinned_memory(false);
      return at::empty_strided(tensor.sizes(), tensor.strides(), options);
    });
  }

  bool resize_outputs(const Stack& shapes) {
    for (size_t place = 0; place < count_; ++place) {
      if (!is_output(place)) continue;
      auto size = shapes[place].toTensor().sizes();
      if (size != arguments_[place].toTensor().sizes()) emulated::resize(arguments_[place].toTensor(), size, {});
    }
    return true;
  }

  bool is_output(size_t place) const { return schema_.arguments()[place].is_out() && arguments_[place].isTensor(); }

  void queue() {
    std::vector<Tensor> targets;
    for (auto& tensor : made_) targets.push_back(bare(tensor));
    // A kernel may resize what it writes to, which memory that is not its own cannot be.
    std::vector<std::pair<Tensor, Tensor>> outputs;
    for (size_t place = 0; place < count_ && is_out_ && aliases_; ++place) {
      if (!is_output(place)) continue;
      auto given = arguments_[place].toTensor();
      outputs.push_back({at::empty({0}, given.options().device(at::kCPU)), bare(given)});
      host_[place] = outputs.back().first;
    }
    current_stream(device_).push([op = op_, host = host_, targets, outputs, aliases = aliases_]() mutable {
      try {
        op.callBoxed(&host);
      } catch (const c10::Error& error) {
        throw std::runtime_error(op.schema().name() + ": " + error.what_without_backtrace());
      }
      for (auto& [from, to] : outputs) to.copy_(from);
      if (!aliases) fill(targets, host, op.schema().name());
    });
  }

  static void fill(const std::vector<Tensor>& targets, const Stack& values, const std::string& name) {
    size_t number = 0;
    for (auto& value : values) {
      map_tensors(value, [&](const Tensor& tensor) {
        if (number < targets.size() && tensor.defined() && targets[number].defined() && tensor.numel() &&
            targets[number].numel()) {
          bool fits =
              tensor.sizes() == targets[number].sizes() && tensor.scalar_type() == targets[number].scalar_type();
          TORCH_CHECK(fits, "EMULATOR: the meta kernel of ", name, " is wrong");
          targets[number].copy_(tensor);
        }
        ++number;
        return tensor;
      });
    }
  }

  void run_now() {
    wait_for(current_stream(device_), "operator " + schema_.name());
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    op_.callBoxed(&host_);
    if (aliases_) return;
    results_.clear();
    for (auto& value : host_) {
      results_.push_back(map_tensors(value, [&](const Tensor& tensor) {
        auto result = empty_like(tensor, device_);
        if (tensor.defined() && tensor.numel()) bare(result).copy_(tensor);
        return result;
      }));
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  const size_t count_;
  Stack* stack_;
  Stack arguments_, host_, results_;
  std::vector<Tensor> made_;  // results that are new
  DeviceIndex device_ = 0;
  bool is_out_ = false;
  bool aliases_ = false;  // all results are arguments
};

inline void fallback(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

// ---- Operators whose general form is no kernel of the CPU's

inline Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                          IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                          IntArrayRef output_padding, int64_t groups) {
  auto device = input.device().index();
  check(device);
  bool has_bias = bias && bias->defined();
  TORCH_CHECK(weight.device() == input.device() && (!has_bias || bias->device() == input.device()),
              "Expected all tensors to be on the same device (convolution)");
  std::vector<int64_t> size{input.size(0), transposed ? weight.size(1) * groups : weight.size(0)};
  for (int64_t axis = 2; axis < input.dim(); ++axis) {
    auto place = axis - 2;
    auto extent = dilation[place] * (weight.size(axis) - 1);
    if (transposed)
      size.push_back((input.size(axis) - 1) * stride[place] - 2 * padding[place] + extent + output_padding[place] + 1);
    else
      size.push_back((input.size(axis) + 2 * padding[place] - extent - 1) / stride[place] + 1);
  }
  auto format = input.dim() == 4 ? input.suggest_memory_format() : at::MemoryFormat::Contiguous;
  auto output = at::empty(size, input.options().memory_format(format));
  current_stream(device).push(
      [=, x = bare(input), w = bare(weight), b = has_bias ? bare(*bias) : Tensor(), y = bare(output), s = stride.vec(),
       p = padding.vec(), d = dilation.vec(),
       o = output_padding.vec()] { y.copy_(at::convolution(x, w, b, s, p, d, transposed, o, groups)); });
  return output;
}

inline std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input,
                                                               const Tensor& weight, IntArrayRef stride,
                                                               IntArrayRef padding, IntArrayRef dilation,
                                                               bool transposed, IntArrayRef output_padding,
                                                               int64_t groups, std::array<bool, 3> wanted) {
  auto device = input.device().index();
  check(device);
  std::vector<int64_t> biases{transposed ? weight.size(1) * groups : weight.size(0)};
  std::array<Tensor, 3> results = {wanted[0] ? at::empty_like(input) : Tensor(),
                                   wanted[1] ? at::empty_like(weight) : Tensor(),
                                   wanted[2] ? at::empty(biases, gradient.options()) : Tensor()};
  std::array<Tensor, 3> targets = {bare(results[0]), bare(results[1]), bare(results[2])};
  current_stream(device).push([=, g = bare(gradient), x = bare(input), w = bare(weight), s = stride.vec(),
                               p = padding.vec(), d = dilation.vec(), o = output_padding.vec()] {
    auto [first, second, third] =
        at::convolution_backward(g, x, w, at::OptionalIntArrayRef(biases), s, p, d, transposed, o, groups, wanted);
    Tensor values[3] = {first, second, third};
    for (int number = 0; number < 3; ++number)
      if (wanted[number]) targets[number].copy_(values[number]);
  });
  return {results[0], results[1], results[2]};
}

inline std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double rate, std::optional<bool> training) {
  auto options = input.options().dtype(at::kBool);
  if (training && !*training) return {input.clone(), at::ones_like(input, options)};
  auto mask = at::empty_like(input, options).bernoulli_(1 - rate);
  return {input * mask * (rate == 1 ? 0 : 1 / (1 - rate)), mask};
}

}  // namespace emulated
