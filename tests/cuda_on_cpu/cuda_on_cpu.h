// Runs CUDA C++ kernels on an x86-64 host with plain g++, for tests of their results and of their barriers.
//
//   g++ -std=c++17 -fno-strict-aliasing -I$CUDA/include -include cuda_on_cpu.h -x c++ kernels_cuda.cu
//
// Included ahead of kernel source that is plain CUDA: it stands in for the device built-ins that such source uses and
// for the functions of the runtime API that launch it. A CUDA thread is a fiber, run until it waits at a barrier; with
// -DCUDA_ON_CPU_THREADS it is a thread of the operating system, which is slow but lets ThreadSanitizer see races. One
// block runs at a time, and one launch. Shared memory starts as NaN in every block, but for a template's, whose section
// the compiler does not choose.
//
// CUDA_ON_CPU_ORDER=forward|reverse|random[:seed] is the order in which fibers are resumed (random:1 unless told).
// CUDA_ON_CPU_FAIL=NAME makes the runtime function of that name return cudaErrorInvalidValue.
//
// Not modelled: what a warp does in lockstep (nothing does here), streams, memory that only one side sees.
#pragma once

#include <cuda_runtime_api.h>
#include <sys/mman.h>
#include <xmmintrin.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
// One block runs at a time, so its shared memory may be static; the section lets every block find it as NaN.
#define __shared__ __attribute__((section("cuda_shared"))) static

inline dim3 gridDim, blockDim;

extern "C" char __start_cuda_shared[] __attribute__((weak));
extern "C" char __stop_cuda_shared[] __attribute__((weak));

namespace cuda_on_cpu {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr int kProcessors = 2;  // of the GPU that this is
constexpr size_t kStackBytes = 256 * 1024 + 2112;  // an odd stride: stacks must not meet in one set of the cache

// The stream of every launch: a launch on another, the default stream say, is an error.
inline cudaStream_t stream() { return reinterpret_cast<cudaStream_t>(0x5eed); }

// A barrier, and what the threads that meet at it hand each other: two rounds of slots, so that one barrier will do.
struct Barrier {
  int expected = 0, arrived = 0;
  unsigned line = 0;
  uint64_t round = 0;
  uint64_t slots[2][kWarp] = {};
  int votes[2] = {};
  std::mutex mutex;
  std::condition_variable changed;
};

struct Thread {
  int index = 0;
  bool done = false;
  Barrier* waits_at = nullptr;
  uint64_t waits_for = 0;  // the round that must be over
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  void* fake_stack = nullptr;
};

inline std::deque<Thread> threads;
inline Barrier block_barrier, warp_barriers[kMaxThreads / kWarp];
inline dim3 block_index;
inline std::function<void()> body;
#ifdef CUDA_ON_CPU_THREADS
inline thread_local Thread* current = nullptr;
#else
inline Thread* current = nullptr;
#endif

[[noreturn]] inline void fail(const char* what, unsigned line) {
  std::fprintf(stderr, "cuda_on_cpu: %s (line %u, block %u, thread %d)\n", what, line, block_index.x,
               current ? current->index : -1);
  std::abort();
}

// ---------------------------------------------------------------------------------------------------------------------
// Fibers

inline void* scheduler_stack_pointer = nullptr;
inline void* scheduler_fake_stack = nullptr;
inline const void* scheduler_stack = nullptr;
inline size_t scheduler_stack_bytes = 0;

extern "C" void cuda_on_cpu_switch(void** from, void** to);
__asm__(
    ".text\n.weak cuda_on_cpu_switch\n.type cuda_on_cpu_switch,@function\ncuda_on_cpu_switch:\n"
    " push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
    " mov %rsp,(%rdi)\n mov (%rsi),%rsp\n"
    " pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret\n"
    ".size cuda_on_cpu_switch,.-cuda_on_cpu_switch\n");

inline void to_scheduler() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&current->fake_stack, scheduler_stack, scheduler_stack_bytes);
#endif
  cuda_on_cpu_switch(&current->stack_pointer, &scheduler_stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(current->fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

inline void to_fiber(Thread& thread) {
  current = &thread;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&scheduler_fake_stack, thread.stack, kStackBytes);
#endif
  cuda_on_cpu_switch(&scheduler_stack_pointer, &thread.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

inline void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  for (;;) {
    body();
    current->done = true;
    to_scheduler();
  }
}

inline void make_fiber(Thread& thread) {
  void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("no memory for a fiber's stack", 0);
  thread.stack = static_cast<char*>(memory);
  void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(thread.stack + kStackBytes) & ~uintptr_t{63});
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&fiber_main);
  thread.stack_pointer = top - 6;
}

// ---------------------------------------------------------------------------------------------------------------------
// Barriers

inline void open(Barrier& barrier) {
  barrier.arrived = 0;
  ++barrier.round;
  barrier.votes[barrier.round & 1] = 0;
}

// Waits until every thread of the group has come, and returns the round in which they met.
inline uint64_t meet(Barrier& barrier, unsigned line, int vote = 0, const void* post = nullptr, size_t post_bytes = 0) {
#ifdef CUDA_ON_CPU_THREADS
  std::unique_lock<std::mutex> lock(barrier.mutex);
#endif
  if (barrier.arrived > 0 && barrier.line != line) fail("threads of one group wait at different barriers", line);
  barrier.line = line;
  const uint64_t round = barrier.round;
  if (post) std::memcpy(&barrier.slots[round & 1][current->index % kWarp], post, post_bytes);
  barrier.votes[round & 1] += vote;
  if (++barrier.arrived == barrier.expected) {
    open(barrier);
#ifdef CUDA_ON_CPU_THREADS
    barrier.changed.notify_all();
  } else if (!barrier.changed.wait_for(lock, std::chrono::seconds(60), [&] { return barrier.round != round; })) {
    fail("a barrier that some thread never reaches", line);
  }
#else
  } else {
    current->waits_at = &barrier;
    current->waits_for = round;
    to_scheduler();
  }
#endif
  return round;
}

inline Barrier& warp_barrier() { return warp_barriers[current->index / kWarp]; }

// ---------------------------------------------------------------------------------------------------------------------
// Launches

inline void begin_block(unsigned block) {
  const int size = static_cast<int>(blockDim.x);
  block_index = dim3(block);
  block_barrier.expected = size;
  for (int first = 0; first < size; first += kWarp)
    warp_barriers[first / kWarp].expected = std::min(kWarp, size - first);
  if (__start_cuda_shared) std::memset(__start_cuda_shared, 0xff, __stop_cuda_shared - __start_cuda_shared);
  for (int i = 0; i < size; ++i) {
    threads[i].index = i;
    threads[i].done = false;
    threads[i].waits_at = nullptr;
  }
}

inline void run_blocks_in_threads() {
  const int size = static_cast<int>(blockDim.x);
  pthread_barrier_t edge;  // between blocks, and at the end: races with threads that have ended are not reported
  pthread_barrier_init(&edge, nullptr, size);
  std::vector<std::thread> running;
  for (int i = 0; i < size; ++i)
    running.emplace_back([&, i] {
      for (unsigned block = 0; block < gridDim.x; ++block) {
        if (i == 0) begin_block(block);
        pthread_barrier_wait(&edge);
#ifdef CUDA_ON_CPU_THREADS
        current = &threads[i];
#endif
        body();
        pthread_barrier_wait(&edge);
      }
    });
  for (std::thread& thread : running) thread.join();
  pthread_barrier_destroy(&edge);
}

inline void run_blocks_in_fibers() {
  const int size = static_cast<int>(blockDim.x);
  const char* wanted = std::getenv("CUDA_ON_CPU_ORDER");
  const bool shuffled = !wanted || !std::strncmp(wanted, "random", 6);
  std::mt19937 random(wanted && shuffled && wanted[6] ? std::atoi(wanted + 7) : 1);
  std::vector<int> order(size);
  std::iota(order.begin(), order.end(), 0);
  if (wanted && !std::strcmp(wanted, "reverse")) std::reverse(order.begin(), order.end());
  for (int i = 0; i < size; ++i)
    if (!threads[i].stack) make_fiber(threads[i]);
  for (unsigned block = 0; block < gridDim.x; ++block) {
    begin_block(block);
    if (shuffled) std::shuffle(order.begin(), order.end(), random);
    for (bool unfinished = true; unfinished;) {
      bool progress = unfinished = false;
      Thread* stuck = nullptr;
      for (int i : order) {
        Thread& thread = threads[i];
        if (thread.done) continue;
        unfinished = true;
        if (thread.waits_at && thread.waits_at->round == thread.waits_for) {
          stuck = &thread;
          continue;
        }
        thread.waits_at = nullptr;
        progress = true;
        to_fiber(thread);
      }
      if (unfinished && !progress) {
        current = stuck;
        fail("a barrier that some thread never reaches", stuck->waits_at->line);
      }
    }
    if (block_barrier.arrived) fail("a barrier that some thread never reaches", block_barrier.line);
  }
}

inline bool told_to_fail(const char* function) {
  const char* name = std::getenv("CUDA_ON_CPU_FAIL");
  return name && !std::strcmp(name, function);
}

inline uint64_t launches = 0;  // of kernels, since the process began

template <class... Parameters, class... Arguments>
cudaError_t launch(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), const Arguments&... arguments) {
  static std::mutex one_at_a_time;
  const dim3 grid = config->gridDim, block = config->blockDim;
  if (told_to_fail("cudaLaunchKernelEx")) return cudaErrorInvalidValue;
  if (config->stream != stream()) return cudaErrorInvalidResourceHandle;
  if (grid.x == 0 || grid.y != 1 || grid.z != 1 || block.x == 0 || block.x > kMaxThreads || block.y != 1 ||
      block.z != 1 || config->dynamicSmemBytes != 0 || (sizeof(Parameters) + ... + 0) > 32764)
    return cudaErrorInvalidConfiguration;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(0x1f80);  // XLA's threads flush subnormals, a GPU does not
  gridDim = grid;
  blockDim = block;
  ++launches;
  while (threads.size() < block.x) threads.emplace_back();
  body = [&] { kernel(arguments...); };
#ifdef CUDA_ON_CPU_THREADS
  run_blocks_in_threads();
#else
  run_blocks_in_fibers();
#endif
  _mm_setcsr(saved);
  return cudaSuccess;
}

}  // namespace cuda_on_cpu

// ---------------------------------------------------------------------------------------------------------------------
// Device built-ins

#define threadIdx (uint3{static_cast<unsigned>(cuda_on_cpu::current->index), 0, 0})
#define blockIdx (uint3{cuda_on_cpu::block_index.x, 0, 0})

inline void __syncthreads(unsigned line = __builtin_LINE()) {
  cuda_on_cpu::meet(cuda_on_cpu::block_barrier, line);
}

inline int __syncthreads_or(int predicate, unsigned line = __builtin_LINE()) {
  const uint64_t round = cuda_on_cpu::meet(cuda_on_cpu::block_barrier, line, predicate != 0);
  return cuda_on_cpu::block_barrier.votes[round & 1] != 0;
}

template <class V>
V __shfl_down_sync(unsigned mask, V value, unsigned offset, unsigned line = __builtin_LINE()) {
  static_assert(sizeof(V) <= sizeof(uint64_t), "one slot");
  cuda_on_cpu::Barrier& barrier = cuda_on_cpu::warp_barrier();
  const unsigned lane = cuda_on_cpu::current->index % cuda_on_cpu::kWarp;
  if (mask != ~0u || barrier.expected != cuda_on_cpu::kWarp) cuda_on_cpu::fail("a shuffle of part of a warp", line);
  const uint64_t round = cuda_on_cpu::meet(barrier, line, 0, &value, sizeof value);
  if (lane + offset < cuda_on_cpu::kWarp)
    std::memcpy(&value, &barrier.slots[round & 1][lane + offset], sizeof value);
  return value;
}

// ---------------------------------------------------------------------------------------------------------------------
// The runtime API

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  return cuda_on_cpu::launch(config, kernel, arguments...);
}
template <class... Parameters>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void (*)(Parameters...), int, size_t) {
  *blocks = 2;
  return cudaSuccess;
}

#define CUDA_ON_CPU_API extern "C" __attribute__((weak)) cudaError_t
CUDA_ON_CPU_API cudaGetLastError() {
  return cuda_on_cpu::told_to_fail("cudaGetLastError") ? cudaErrorInvalidValue : cudaSuccess;
}
CUDA_ON_CPU_API cudaGetDevice(int* device) {
  *device = 0;
  return cuda_on_cpu::told_to_fail("cudaGetDevice") ? cudaErrorInvalidValue : cudaSuccess;
}
CUDA_ON_CPU_API cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount) return cudaErrorInvalidValue;
  *value = cuda_on_cpu::kProcessors;
  return cudaSuccess;
}
CUDA_ON_CPU_API cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (cuda_on_cpu::told_to_fail("cudaMemcpyAsync")) return cudaErrorInvalidValue;
  if (kind != cudaMemcpyDeviceToDevice || stream != cuda_on_cpu::stream()) return cudaErrorInvalidValue;
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
CUDA_ON_CPU_API cudaDriverGetVersion(int* version) {
  const char* wanted = std::getenv("CUDA_ON_CPU_DRIVER");
  *version = wanted ? std::atoi(wanted) : 0;
  return cudaSuccess;
}
extern "C" __attribute__((weak)) const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "cudaErrorInvalidValue" : "another error";
}
extern "C" __attribute__((weak)) const char* cudaGetErrorString(cudaError_t) { return "as the test wants it"; }
