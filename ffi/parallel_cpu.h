// What the handlers for the CPU share: the choice of an instruction set, and work spread over XLA's own thread pool.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace globalclip {

namespace ffi = xla::ffi;

static inline bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

// XLA flushes subnormals on its threads. Inside a task they count for what they are, on every thread alike.
class KeepSubnormals {
 public:
  KeepSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~kFlush); }
  ~KeepSubnormals() { _mm_setcsr(saved_); }

 private:
  friend class FlushSubnormals;
  static constexpr unsigned kFlush = 0x8040;
  unsigned saved_;
};

// Inside one of these they are zero: moments that decay would slow a machine down that takes them for numbers.
class FlushSubnormals {
 public:
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | KeepSubnormals::kFlush); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
};

// `work(i)` for every i below `count`, by the caller and by helpers from XLA's pool, `threads` of them at most.
//
// Scheduling tasks and waiting for them deadlocks when every thread of the pool does so. Here nobody waits for a task
// that has not begun: all claim numbers from one counter, the caller too until none is left, and then it waits only for
// numbers already claimed. A helper that starts late finds nothing to claim and never touches `work`.
template <class Work>
void parallel_for(ffi::ThreadPool& pool, int64_t threads, int64_t count, const Work& work) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto shared = std::make_shared<Shared>();
  auto claim = [shared, count, work = &work] {
    KeepSubnormals keep;
    for (int64_t i; (i = shared->next.fetch_add(1)) < count; shared->done.fetch_add(1)) (*work)(i);
  };
  for (int64_t helpers = std::min({threads, pool.num_threads(), count}) - 1; helpers > 0; --helpers)
    pool.Schedule(std::function<void()>(claim));
  claim();
  for (int spins = 0; shared->done.load() < count; ++spins)
    if (spins < 1000) _mm_pause(); else std::this_thread::yield();
}

// Bytes worth another thread: waking one takes as long as a pass over so many.
constexpr int64_t kBytesAThread = 256 * 1024;

}  // namespace globalclip
