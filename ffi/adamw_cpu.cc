// Compiled once for each instruction set, with OGC_ADAMW_KERNELS naming the table it defines.
//
// The loops are plain: the compiler makes vectors of them. -ffp-contract=off keeps both instruction sets to the same
// bits.
#include "adamw_cpu.h"

namespace globalclip {
namespace {

// Elements that are converted at a time where a leaf is not of T: four such blocks stay in the first cache.
constexpr int kBlock = 512;
constexpr int kPrefetch = 256;  // elements ahead

template <class T, class In>
void widen(const In* from, int size, T* to) {
  for (int i = 0; i < size; ++i) {
    if constexpr (std::is_same_v<T, float>) to[i] = to_float(from[i]);
    else to[i] = to_double(from[i]);
  }
}

template <class T, class Out>
void narrow(const T* from, int size, Out* to) {
  for (int i = 0; i < size; ++i) {
    if constexpr (std::is_same_v<T, float>) to[i] = from_float<Out>(from[i]);
    else to[i] = from_double<Out>(from[i]);
  }
}

// A run of elements of one array of a leaf as numbers of T: where it lies, or in a block of our own.
template <class T>
class Run {
 public:
  Run(const void* data, DType dtype, int64_t at, int size) : dtype_(dtype), size_(size) {
    const DType own = std::is_same_v<T, double> ? DType::kF64 : DType::kF32;
    memory_ = const_cast<char*>(static_cast<const char*>(data)) + at * element_bytes(dtype);
    if (dtype == own) {
      numbers_ = static_cast<T*>(memory_);
      return;
    }
    numbers_ = block_;
    with_step_type<T>(dtype, [&](auto tag) { widen(static_cast<const decltype(tag)*>(memory_), size_, block_); });
  }
  T* numbers() { return numbers_; }
  // Rounds the numbers back to where they came from.
  void put() {
    if (numbers_ == block_)
      with_step_type<T>(dtype_, [&](auto tag) { narrow(block_, size_, static_cast<decltype(tag)*>(memory_)); });
  }

 private:
  DType dtype_;
  int size_;
  void* memory_;
  T* numbers_;
  alignas(64) T block_[kBlock];
};

template <bool kDecays, class T, class Change>
void step_numbers(const T* __restrict g, T* __restrict m, T* __restrict v, T* __restrict p, int size, Change change,
                  const ScaleOp<T>& op, const Coefficients<T>& of) {
  const ScaleOp<T> by = op;
  const Coefficients<T> with = of;
  constexpr int kLine = 64 / sizeof(T);
  int i = 0;
  for (; i + kLine <= size; i += kLine) {
    for (const T* x : {g, static_cast<const T*>(m), static_cast<const T*>(v), static_cast<const T*>(p)})
      __builtin_prefetch(x + i + kPrefetch);
    for (int j = i; j < i + kLine; ++j) adamw(change(g[j], by), with, kDecays, m[j], v[j], p[j]);
  }
  for (; i < size; ++i) adamw(change(g[i], by), with, kDecays, m[i], v[i], p[i]);
}

template <class T>
void step(const StepLeaf& leaf, int64_t begin, int64_t end, const ScaleOp<T>& op, const Coefficients<T>& of) {
  with_gradient_change(op.kind(), [&](auto change) {
    for (int64_t at = begin; at < end; at += kBlock) {
      const int size = static_cast<int>(end - at < kBlock ? end - at : kBlock);
      Run<T> g(leaf.g, leaf.g_type, at, size), m(leaf.m, leaf.m_type, at, size), v(leaf.v, leaf.v_type, at, size),
          p(leaf.p, leaf.p_type, at, size);
      const auto run = leaf.decays ? step_numbers<true, T, decltype(change)> : step_numbers<false, T, decltype(change)>;
      run(g.numbers(), m.numbers(), v.numbers(), p.numbers(), size, change, op, of);
      m.put();
      v.put();
      p.put();
    }
  });
}

}  // namespace

const AdamwKernels OGC_ADAMW_KERNELS = {step<float>, step<double>};

}  // namespace globalclip
