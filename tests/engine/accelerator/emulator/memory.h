// Memory of an emulated device, and page-locked memory of the host. What is not yet written, or freed, is NaN.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <pthread.h>

#include <set>

#include "streams.h"

namespace emulated {

constexpr int UNWRITTEN = 0xFF;         // each float of such bytes is NaN
constexpr unsigned char BEYOND = 0xA5;  // after the end of each block
constexpr size_t GUARD = 64;
constexpr size_t QUARANTINE = 64 << 20;  // bytes that are freed but not reused, so that late readers find NaN

inline size_t rounded(size_t bytes) { return (bytes + 511) / 512 * 512; }  // as CUDA's caching allocator counts

struct Block {
  void* start;
  size_t bytes;
  DeviceIndex device;
  Stream* home;                                   // the stream in which it was allocated
  std::vector<std::pair<Stream*, int64_t>> used;  // other streams that said so (record_stream), and up to where
};

class DeviceMemory final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    check(current_device);
    static std::once_flag first;
    std::call_once(first, [] {
      pthread_atfork(nullptr, nullptr, [] {
        is_forked = true;
        on_wait = nullptr;
      });
    });
    count_in(bytes);
    auto* block = new Block{nullptr, bytes, current_device, &current_stream(current_device), {}};
    if (bytes) {
      TORCH_CHECK(!posix_memalign(&block->start, 64, bytes + GUARD));
      memset(block->start, UNWRITTEN, bytes);
      memset(static_cast<char*>(block->start) + bytes, BEYOND, GUARD);
    }
    return {block->start, block, &release, c10::Device(KIND, current_device)};
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream by) override {
    auto* block = static_cast<Block*>(pointer.get_context());
    auto& user = stream(by.device_index(), by.id());
    if (block && &user != block->home) block->used.push_back({&user, user.last()});
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    finish(current_device);
    memcpy(to, from, bytes);
  }

  bool initialized() override { return true; }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void emptyCache(c10::MempoolId_t) override {}

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock_);
    return stats_[device];
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock_);
    for (auto* kind : counted(device)) kind->reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock_);
    for (auto* kind : counted(device)) kind->reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(lock_);
    return {capacity - stats_[device].allocated_bytes[0].current, capacity};
  }

 private:
  static std::array<c10::CachingAllocator::Stat*, 3> counted(DeviceIndex device) {
    auto& stats = stats_[device];
    return {&stats.allocated_bytes[0], &stats.reserved_bytes[0], &stats.active_bytes[0]};
  }

  static void count_in(size_t bytes) {
    std::lock_guard<std::mutex> guard(lock_);
    auto& stats = stats_[current_device];
    auto left = capacity - stats.allocated_bytes[0].current;
    if (left < static_cast<int64_t>(rounded(bytes))) {
      ++stats.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "EMU out of memory. Tried to allocate ", bytes, " bytes. EMU ",
                       int(current_device), " has a total capacity of ", capacity, " bytes of which ", left,
                       " bytes is free.");
    }
    for (auto* kind : counted(current_device)) kind->increase(rounded(bytes));
  }

  // Memory is free for the host at once, and for the device in the order of the stream it was allocated in.
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    {
      std::lock_guard<std::mutex> guard(lock_);
      for (auto* kind : counted(block->device)) kind->decrease(rounded(block->bytes));
    }
    if (is_forked) return;
    block->home->push([block] {
      for (auto& [user, number] : block->used) user->until(number);
      if (block->start) poison(block);
      keep_for_a_while(block);
    });
  }

  static void poison(Block* block) {
    auto* end = static_cast<unsigned char*>(block->start) + block->bytes;
    for (size_t byte = 0; byte < GUARD; ++byte)
      TORCH_CHECK(end[byte] == BEYOND, "a kernel wrote beyond the end of a tensor of ", block->bytes, " bytes");
    memset(block->start, UNWRITTEN, block->bytes);
  }

  static void keep_for_a_while(Block* block) {
    static std::mutex mutex;
    static std::deque<Block*> kept;
    static size_t bytes = 0;
    std::lock_guard<std::mutex> guard(mutex);
    kept.push_back(block);
    bytes += block->bytes;
    while (bytes > QUARANTINE) {
      auto* oldest = kept.front();
      kept.pop_front();
      bytes -= oldest->bytes;
      free(oldest->start);
      delete oldest;
    }
  }

  static inline std::mutex lock_;
  static inline c10::CachingDeviceAllocator::DeviceStats stats_[MOST_DEVICES];
};

inline DeviceMemory device_memory;

// Page-locked memory. It is freed only after the copies from and to it that were started before, as on CUDA.
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* start = aligned_alloc(64, (bytes + 127) / 64 * 64);
    memset(start, UNWRITTEN, bytes);
    std::lock_guard<std::mutex> guard(lock_);
    blocks()[start] = {bytes, {}};
    return {start, start, &release, c10::Device(c10::kCPU)};
  }

  // Whether `start` is page-locked memory; then `user` is one of the streams that it is kept for.
  static bool keep_for(const void* start, Stream* user) {
    std::lock_guard<std::mutex> guard(lock_);
    auto found = blocks().find(start);
    if (found == blocks().end()) return false;
    if (user) found->second.users.insert(user);
    return true;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { memcpy(to, from, bytes); }

 private:
  struct About {
    size_t bytes = 0;
    std::set<Stream*> users;
  };

  static void release(void* start) {
    About about;
    {
      std::lock_guard<std::mutex> guard(lock_);
      about = blocks()[start];
      blocks().erase(start);
    }
    auto freed_last = std::shared_ptr<void>(start, [bytes = about.bytes](void* memory) {
      memset(memory, UNWRITTEN, bytes);
      free(memory);
    });
    if (is_forked) return;
    for (auto* user : about.users) user->push([freed_last] {});
  }

  static std::map<const void*, About>& blocks() {
    static auto* all = new std::map<const void*, About>;
    return *all;
  }
  static inline std::mutex lock_;
};

inline PinnedMemory pinned_memory;

}  // namespace emulated
