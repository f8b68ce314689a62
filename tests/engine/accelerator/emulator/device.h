// What torch asks of a kind of device: current device and stream, events, random numbers.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace emulated {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static DeviceIndex index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
  static c10::Stream named(DeviceIndex device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(KIND, device), id);
  }

  c10::DeviceType type() const override { return KIND; }
  DeviceIndex deviceCount() const noexcept override { return device_count; }
  c10::Device getDevice() const override { return c10::Device(KIND, current_device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < device_count, "EMU error: invalid device ordinal");
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    current_device = device.index();
    return before;
  }

  c10::Stream getStream(c10::Device device) const override { return named(index(device), current_ids[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return named(index(device), 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<int64_t> made = 0;
    return named(index(device), ++made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    auto before = getStream(next.device());
    current_ids[next.device_index()] = next.id();
    return before;
  }
  bool queryStream(const c10::Stream& asked) const override { return own(asked).queued() == 0; }
  void* getStreamNativeHandle(const c10::Stream asked) const override { return &own(asked); }
  void synchronizeStream(const c10::Stream& asked) const override { wait_for(own(asked), "stream.synchronize"); }
  void synchronizeDevice(const DeviceIndex asked) const override {
    auto device = asked < 0 ? current_device : asked;
    report_wait("device.synchronize");
    finish(device);
    check(device);
  }

  void record(void** event, const c10::Stream& on, const DeviceIndex, const c10::EventFlag) const override {
    auto* fresh = new Event;
    fresh->stream = &own(on);
    fresh->number = fresh->stream->push([time = fresh->milliseconds] { *time = now(); });
    destroyEvent(*event, 0);
    *event = fresh;
  }
  void block(void* event, const c10::Stream& later) const override {
    if (!event) return;
    auto* before = static_cast<Event*>(event);
    own(later).push([stream = before->stream, number = before->number] { stream->until(number); });
  }
  // A loop that asks again and again must come to an end, so each question lets one piece of work run.
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto* asked = static_cast<Event*>(event);
    if (!asked->stream->is_done(asked->number)) asked->stream->one_more();
    return asked->stream->is_done(asked->number);
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    auto* asked = static_cast<Event*>(event);
    report_wait("event.synchronize");
    asked->stream->until(asked->number);
    check(asked->stream->device);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    for (auto* event : {static_cast<Event*>(first), static_cast<Event*>(second)})
      TORCH_CHECK(event && event->stream->is_done(event->number), "the event is not done");
    return *static_cast<Event*>(second)->milliseconds - *static_cast<Event*>(first)->milliseconds;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& by) const override {
    device_memory.recordStream(pointer, by);
  }

 private:
  static Stream& own(const c10::Stream& asked) { return stream(asked.device_index(), asked.id()); }
};

// A seed and a count, as Philox has on CUDA: the host advances the count when it queues the work that draws.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(DeviceIndex device)
      : GeneratorImpl(c10::Device(KIND, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::kByte);
    memcpy(state.data_ptr(), &seed_, 8);
    memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.is_cpu(), "RNG state is wrong");
    memcpy(&seed_, state.data(), 8);
    memcpy(&offset_, static_cast<const char*>(state.data()) + 8, 8);
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  // The CPU's generator for one operator, and the count advanced.
  at::Generator next() {
    std::lock_guard<std::mutex> guard(mutex_);
    auto mixed = (seed_ ^ (0x9E3779B97F4A7C15ULL * (offset_ + 1))) * 0xBF58476D1CE4E5B9ULL;
    return at::make_generator<at::CPUGeneratorImpl>(mixed >> 3 ^ offset_++);
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

inline at::Generator& generator(DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < device_count; ++index) made->push_back(at::make_generator<Generator>(index));
    return made;
  }();
  return (*all)[device < 0 ? current_device : device];
}

inline at::Generator next_generator(const std::optional<at::Generator>& given, DeviceIndex device) {
  if (!given || !given->defined()) return generator(device).get<Generator>()->next();
  TORCH_CHECK(!given->device().is_cpu(), "Expected a 'emu' device type for generator but found 'cpu'");
  return given->get<Generator>()->next();
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(c10::Device(KIND, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = current_device;
    if (device >= 0) current_device = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* start) const override { return PinnedMemory::keep_for(start, nullptr); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(KIND, current_device); }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* resized = storage.unsafeGetStorageImpl();
    auto device = resized->device().index();
    auto before = exchangeDevice(device);
    auto fresh = device_memory.allocate(bytes);
    exchangeDevice(before);
    auto kept = std::min(bytes, resized->nbytes());
    current_stream(device).push([to = fresh.get(), from = resized->data(), kept] {
      if (kept) memcpy(to, from, kept);
    });
    resized->set_data_ptr(std::move(fresh));
    resized->set_nbytes(bytes);
  }
};

}  // namespace emulated
