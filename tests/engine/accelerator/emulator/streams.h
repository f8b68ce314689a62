// Streams of an emulated device: work is queued by the host, and runs when the host waits for it.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/util/Exception.h>
#include <torch/extension.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace emulated {

using c10::DeviceIndex;
using Work = std::function<void()>;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr int MOST_DEVICES = 8;

inline int64_t setting(const char* name, int64_t otherwise) {
  auto value = getenv(name);
  return value ? atoll(value) : otherwise;
}

inline const int device_count = std::min<int64_t>(setting("EMU_DEVICES", 2), MOST_DEVICES);
// "lazy": work runs when the host waits for it, as late as it may, always in the same order. "eager": at once.
inline const bool is_lazy = std::string(getenv("EMU_MODE") ? getenv("EMU_MODE") : "lazy") != "eager";
// More than that is run without a wait, as a driver does whose queue is full.
inline const int64_t most_queued = setting("EMU_QUEUE", 20000);
inline const int64_t capacity = setting("EMU_MEMORY", int64_t(1) << 40);  // bytes of each device

inline thread_local DeviceIndex current_device = 0;
inline thread_local bool is_working = false;  // this thread runs work of a device
inline bool is_forked = false;                // this process was forked from one that used a device

// ---- Errors of work: they come late, and every later call reports them, as those of kernels do on CUDA.

inline std::string failures[MOST_DEVICES];
inline std::mutex failures_lock;

inline void note_failure(DeviceIndex device, const std::string& what) {
  std::lock_guard<std::mutex> guard(failures_lock);
  if (failures[device].empty()) failures[device] = what.substr(0, 300);
}

inline void check(DeviceIndex device) {
  TORCH_CHECK(!is_forked, "Cannot re-initialize EMU in forked subprocess. Use the 'spawn' start method");
  std::lock_guard<std::mutex> guard(failures_lock);
  if (failures[device].empty() || is_working) return;
  auto text =
      "EMU error: device-side assert triggered\nEMU kernel errors might be asynchronously reported at some other API "
      "call, so the stacktrace below might be incorrect.\n(emulated: " +
      failures[device] + ")";
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 710, text);
}

// ---- Waits of the host, reported to Python with the reason.

inline py::object* on_wait = nullptr;

inline void report_wait(const std::string& reason) {
  if (!on_wait || is_working || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  (*on_wait)(reason);
}

// Work may need the interpreter's lock, which the waiting thread may hold.
struct WithoutInterpreter {
  PyThreadState* state = nullptr;
  WithoutInterpreter() {
    if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
  }
  ~WithoutInterpreter() {
    if (state) PyEval_RestoreThread(state);
  }
};

// ---- Streams

class Stream {
 public:
  Stream(DeviceIndex device, int64_t id) : device(device), id(id) {}

  // Queue a piece of work. Returns its number, for `until`.
  int64_t push(Work work) {
    if (!is_lazy) {
      execute(work);
      return 0;
    }
    int64_t number;
    {
      std::lock_guard<std::mutex> guard(lock_);
      works_.push_back(std::move(work));
      number = ++pushed_;
    }
    if (number - done_ > most_queued) until(number - most_queued / 2);
    return number;
  }

  bool is_done(int64_t number) {
    std::lock_guard<std::mutex> guard(lock_);
    return done_ >= number;
  }

  int64_t last() {
    std::lock_guard<std::mutex> guard(lock_);
    return pushed_;
  }

  int64_t queued() {
    std::lock_guard<std::mutex> guard(lock_);
    return pushed_ - done_;
  }

  // Run the first `number` pieces of work. Other streams are left behind, unless the work waits for them.
  void until(int64_t number) {
    if (is_done(number)) return;
    WithoutInterpreter without;
    static std::recursive_mutex one_at_a_time;
    std::lock_guard<std::recursive_mutex> running(one_at_a_time);
    while (true) {
      Work work;
      {
        std::lock_guard<std::mutex> guard(lock_);
        if (done_ >= number || works_.empty()) return;
        work = std::move(works_.front());
        works_.pop_front();
      }
      execute(work);
      work = nullptr;
      std::lock_guard<std::mutex> guard(lock_);
      ++done_;
    }
  }

  void one_more() { until(done_ + 1); }
  void all() { until(last()); }

  const DeviceIndex device;
  const int64_t id;

 private:
  // Run work as a kernel runs: nothing of the caller's state (autograd, autocast, modes) is seen.
  void execute(const Work& work) {
    auto was_working = is_working;
    auto was_device = current_device;
    is_working = true;
    current_device = device;
    try {
      at::NoGradGuard no_grad;
      at::AutoDispatchBelowADInplaceOrView below;
      c10::impl::ExcludeDispatchKeyGuard no_cast(c10::autocast_dispatch_keyset);
      c10::impl::ExcludeDispatchKeyGuard no_mode(
          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
      work();
    } catch (const std::exception& error) {
      note_failure(device, error.what());
    }
    is_working = was_working;
    current_device = was_device;
  }

  std::deque<Work> works_;
  int64_t pushed_ = 0;
  std::atomic<int64_t> done_ = 0;
  std::mutex lock_;
};

inline std::mutex streams_lock;
inline std::map<std::pair<DeviceIndex, int64_t>, Stream*>& streams() {
  static auto* all = new std::map<std::pair<DeviceIndex, int64_t>, Stream*>;  // never freed: work may outlive main
  return *all;
}

inline Stream& stream(DeviceIndex device, int64_t id) {
  std::lock_guard<std::mutex> guard(streams_lock);
  auto& found = streams()[{device, id}];
  if (!found) found = new Stream(device, id);
  return *found;
}

inline thread_local int64_t current_ids[MOST_DEVICES];

inline Stream& current_stream(DeviceIndex device) { return stream(device, current_ids[device]); }

// Run all work of a device, in all of its streams.
inline void finish(DeviceIndex device) {
  std::vector<Stream*> found;
  {
    std::lock_guard<std::mutex> guard(streams_lock);
    for (auto& [key, each] : streams())
      if (key.first == device) found.push_back(each);
  }
  for (auto* each : found) each->all();
}

// Wait, as the host does, for a stream.
inline void wait_for(Stream& stream, const std::string& reason) {
  report_wait(reason);
  stream.all();
  check(stream.device);
}

struct Event {
  Stream* stream = nullptr;
  int64_t number = 0;
  std::shared_ptr<double> milliseconds = std::make_shared<double>(0);
};

inline double now() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace emulated
