// Runs the threads of a launch by turns, each on a stack of its own. Compiled without a sanitizer, which would take the
// bookkeeping here for a part of the kernel.
#include "on_cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

// Of the sanitizers; null without them.
extern "C" {
__attribute__((weak)) void __sanitizer_set_death_callback(void (*)());
__attribute__((weak)) void* __tsan_create_fiber(unsigned);
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void __tsan_switch_to_fiber(void*, unsigned);
__attribute__((weak)) void __tsan_set_fiber_name(void*, const char*);
__attribute__((weak)) void __tsan_acquire(void*);
__attribute__((weak)) void __tsan_release(void*);
}

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace on_cpu {

void* dynamic_shared;

namespace {

constexpr size_t kStack = 256 * 1024;
constexpr unsigned kMostThreads = 1024, kMostShared = 48 * 1024, kMostSpins = 10'000'000;
const bool kRaces = __tsan_create_fiber != nullptr;

enum class State { kReady, kAtBlock, kAtWarp, kDone };

struct Thread {
  ucontext_t context;
  void* stacks[2];  // of even and of odd blocks, like the fibers
  void* fibers[2];  // what it is for ThreadSanitizer, in even and in odd blocks
  State state;
  char* order;     // for ThreadSanitizer: what the barrier orders; null: nothing
  unsigned lanes;  // of its warp, for which it waits
  const char* file;
  int line;
  uint64_t value;  // given to the others of its warp
};

struct Shared {
  const void* key;
  void* memory;
  Shared* next;
};

Thread threads[kMostThreads];
Thread* current;  // null: the host's code runs
unsigned count, parity, spins;
ucontext_t host;
void* host_fiber;
void (*body)(const void*);
const void* argument;
Shared* shared_of_block;
cudaError_t last_error = cudaSuccess;

// For ThreadSanitizer. All that the host does is before a launch, which is before all that the host does next. Nothing
// orders two blocks: the objects of even blocks are not those of odd ones.
char begin, end, orders[2][1 + kMostThreads / warpSize];

void say_where() {
  if (current == nullptr) return;
  fprintf(stderr, "\non_cpu: block (%u, %u, %u), thread (%u, %u, %u)\n", blockIdx.x, blockIdx.y, blockIdx.z,
          threadIdx.x, threadIdx.y, threadIdx.z);
}

[[noreturn]] void fail(const char* file, int line, const char* text) {
  fprintf(stderr, "\non_cpu: error: %s:%d: %s\n", file, line, text);
  say_where();
  _Exit(70);
}

void as_fiber(void* fiber) {
  if (kRaces) __tsan_switch_to_fiber(fiber, 1);  // 1: being next orders nothing
}

void suspend() {
  Thread* self = current;
  as_fiber(host_fiber);
  swapcontext(&self->context, &host);
}

void run_thread() {
  if (kRaces) __tsan_acquire(&begin);
  body(argument);
  if (kRaces) __tsan_release(&end);
  current->state = State::kDone;
  suspend();
}

void start(unsigned n) {
  Thread& thread = threads[n];
  void*& stack = thread.stacks[parity];
  if (stack == nullptr) {
    stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    getcontext(&thread.context);
  }
  if (kRaces && thread.fibers[parity] == nullptr) thread.fibers[parity] = __tsan_create_fiber(0);
  if (kRaces) {
    char name[64];
    snprintf(name, sizeof name, "block %u,%u,%u thread %u", blockIdx.x, blockIdx.y, blockIdx.z, n);
    __tsan_set_fiber_name(thread.fibers[parity], name);
  }
  thread.context.uc_stack.ss_sp = stack;
  thread.context.uc_stack.ss_size = kStack;
  thread.context.uc_link = nullptr;
  makecontext(&thread.context, run_thread, 0);
  thread.state = State::kReady;
}

void resume(unsigned n) {
  current = &threads[n];
  threadIdx = {n % blockDim.x, n / blockDim.x % blockDim.y, n / blockDim.x / blockDim.y};
  spins = 0;
  as_fiber(current->fibers[parity]);
  swapcontext(&host, &current->context);
  current = nullptr;
}

void wait(State state, unsigned lanes, char* order, const char* file, int line) {
  if (current == nullptr) fail(file, line, "only the threads of a kernel can wait for one another");
  current->state = state;
  current->lanes = lanes;
  current->order = order;
  current->file = file;
  current->line = line;
  if (kRaces && order != nullptr) __tsan_release(order);
  suspend();
}

void release(Thread& thread) {
  thread.state = State::kReady;
  if (!kRaces || thread.order == nullptr) return;
  as_fiber(thread.fibers[parity]);  // now: when it runs next, another may have come to the next barrier
  __tsan_acquire(thread.order);
  as_fiber(host_fiber);
}

// Lets the threads of a warp continue that wait for each other alone.
bool release_warp(unsigned first) {
  bool any = false;
  const unsigned size = count - first < warpSize ? count - first : warpSize;
  for (unsigned n = 0; n < size; ++n) {
    const Thread& one = threads[first + n];
    bool complete = one.state == State::kAtWarp;
    for (unsigned m = 0; m < size && complete; ++m) {
      const Thread& other = threads[first + m];
      if ((one.lanes >> m & 1) == 0 || other.state == State::kDone) continue;
      complete = other.state == State::kAtWarp && other.line == one.line;
    }
    if (!complete) continue;
    const unsigned lanes = one.lanes;
    for (unsigned m = 0; m < size; ++m) {
      if ((lanes >> m & 1) != 0 && threads[first + m].state == State::kAtWarp) release(threads[first + m]);
    }
    any = true;
  }
  return any;
}

// Nothing can run until some threads are released; false: all are done.
bool release_some() {
  bool any = false;
  for (unsigned first = 0; first < count; first += warpSize) any |= release_warp(first);
  if (any) return true;
  const Thread* waiting = nullptr;
  for (unsigned n = 0; n < count; ++n) {
    Thread& thread = threads[n];
    if (thread.state == State::kDone) continue;
    if (waiting == nullptr) waiting = &thread;
    if (thread.state == waiting->state && thread.line == waiting->line && thread.state == State::kAtBlock) continue;
    char text[512];
    snprintf(text, sizeof text,
             "threads wait here for others of their %s, which wait at %s:%d; all must come to the same barrier",
             waiting->state == State::kAtBlock ? "block" : "warp", thread.file, thread.line);
    const Thread stuck = *waiting;
    current = &thread;
    fail(stuck.file, stuck.line, text);
  }
  for (unsigned n = 0; n < count; ++n) {
    if (threads[n].state == State::kAtBlock) release(threads[n]);
  }
  return waiting != nullptr;
}

void free_shared() {
  while (shared_of_block != nullptr) {
    Shared* next = shared_of_block->next;
    free(shared_of_block->memory);
    free(shared_of_block);
    shared_of_block = next;
  }
}

// New memory holds NaN, so that a value that is read before it is written shows.
void* add_shared(const void* key, size_t bytes) {
  void* memory = nullptr;
  auto* added = static_cast<Shared*>(malloc(sizeof(Shared)));
  if (added == nullptr || posix_memalign(&memory, 16, bytes) != 0) abort();
  memset(memory, 0xff, bytes);
  *added = {key, memory, shared_of_block};
  shared_of_block = added;
  return memory;
}

void run_block(size_t shared_bytes) {
  parity = (blockIdx.x + blockIdx.y + blockIdx.z) % 2;
  dynamic_shared = add_shared(&dynamic_shared, shared_bytes);
  if (kRaces) __tsan_release(&begin);
  for (unsigned n = 0; n < count; ++n) start(n);
  do {
    for (unsigned n = 0; n < count; ++n) {
      if (threads[n].state == State::kReady) resume(n);
    }
  } while (release_some());
  for (Shared* each = shared_of_block; each != nullptr; each = each->next) each->key = nullptr;
  if (!kRaces) free_shared();
}

bool fits(dim3 size, unsigned x, unsigned y, unsigned z) {
  return size.x > 0 && size.y > 0 && size.z > 0 && size.x <= x && size.y <= y && size.z <= z;
}

}  // namespace

void run(dim3 grid, dim3 block, size_t shared_bytes, void (*thread)(const void*), const void* call) {
  if (current != nullptr) fail(__FILE__, __LINE__, "a kernel that launches a kernel does not run on the CPU");
  const uint64_t size = uint64_t{block.x} * block.y * block.z;
  if (!fits(grid, 2147483647, 65535, 65535) || !fits(block, 1024, 1024, 64) || size > kMostThreads ||
      shared_bytes > kMostShared) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  if (__sanitizer_set_death_callback != nullptr) __sanitizer_set_death_callback(say_where);
  if (kRaces) host_fiber = __tsan_get_current_fiber();
  count = static_cast<unsigned>(size);
  body = thread;
  argument = call;
  blockDim = block;
  gridDim = grid;
  for (unsigned z = 0; z < grid.z; ++z) {
    for (unsigned y = 0; y < grid.y; ++y) {
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = {x, y, z};
        run_block(shared_bytes);
      }
    }
  }
  if (kRaces) __tsan_acquire(&end);
  free_shared();
}

void* shared(const void* key, size_t bytes) {
  for (Shared* each = shared_of_block; each != nullptr; each = each->next) {
    if (each->key != key) continue;
    if (kRaces) __tsan_acquire(&begin);
    return each->memory;
  }
  if (!kRaces) return add_shared(key, bytes);
  as_fiber(host_fiber);  // so that no thread of the kernel has written to it before
  void* memory = add_shared(key, bytes);
  __tsan_release(&begin);
  as_fiber(current->fibers[parity]);
  return memory;
}

void sync_block(const char* file, int line) { wait(State::kAtBlock, 0, orders[parity], file, line); }

void sync_warp(unsigned lanes, const char* file, int line) {
  wait(State::kAtWarp, lanes, &orders[parity][1 + (current - threads) / warpSize], file, line);
}

uint64_t exchange(unsigned lanes, uint64_t value, unsigned lane, const char* file, int line) {
  Thread* warp = current - (current - threads) % warpSize;
  current->value = value;
  wait(State::kAtWarp, lanes, nullptr, file, line);
  const uint64_t given = warp + lane < threads + count ? warp[lane].value : value;
  wait(State::kAtWarp, lanes, nullptr, file, line);  // none gives its next value before all have this one
  return given;
}

unsigned ballot(unsigned lanes, bool value, const char* file, int line) {
  unsigned votes = 0;
  Thread* warp = current - (current - threads) % warpSize;
  current->value = value;
  wait(State::kAtWarp, lanes, nullptr, file, line);
  for (unsigned n = 0; n < warpSize && warp + n < threads + count; ++n) {
    if ((lanes >> n & 1) != 0 && warp[n].state != State::kDone) votes |= static_cast<unsigned>(warp[n].value) << n;
  }
  wait(State::kAtWarp, lanes, nullptr, file, line);
  return votes;
}

void spin(const char* file, int line) {
  if (++spins > kMostSpins)
    fail(file, line, "a thread waits in a loop for another; here, they run one after the other");
}

}  // namespace on_cpu

cudaError_t cudaGetLastError() {
  const cudaError_t error = on_cpu::last_error;
  on_cpu::last_error = cudaSuccess;
  return error;
}
