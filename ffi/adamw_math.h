// AdamW: the arithmetic of one element, shared by every native path, host and device.
//
// Everything here is `static inline`, so that a file compiled for a wider instruction set never lends its code to a
// narrower one through the linker.
#pragma once

#include <type_traits>

#include "clip_math.h"

namespace globalclip {

// The numbers of one step, in the order in which the call brings them.
template <class T>
struct Coefficients {
  T b1, one_minus_b1, b2, one_minus_b2, eps, eps_root;
  T correction1, correction2;  // 1 - b1^t, 1 - b2^t
  T learning_rate, weight_decay;
};
constexpr int64_t kCoefficients = 10;

// One leaf of a step: its gradient, and what is updated in place. Each of the four may have a type of its own.
struct StepLeaf {
  const void* g;
  void* m;
  void* v;
  void* p;
  int64_t size;
  DType g_type, m_type, v_type, p_type;
  bool decays;
};

// The numbers of one step, where they lie in memory.
struct StepNumbers {
  const void* op;            // ScaleOp<T>
  const void* coefficients;  // Coefficients<T>
  DType dtype;               // T
  bool skips;                // whether a bad update leaves all as it is
};

// Elements of one piece of work.
constexpr int64_t kStepChunk = 16 * 1024;

static inline OGC_HOST_DEVICE int64_t step_chunks(int64_t size) { return (size + kStepChunk - 1) / kStepChunk; }

// `f(Tag{})` with the element type, of those that a step in T can have.
template <class T, class F>
static inline OGC_HOST_DEVICE auto with_step_type(DType dtype, F f) {
  if constexpr (std::is_same_v<T, double>) {
    return with_element_type(dtype, f);
  } else {
    switch (dtype) {
      case DType::kF16: return f(F16{});
      case DType::kBF16: return f(BF16{});
      default: return f(float{});
    }
  }
}

// What the op makes of a gradient, in T: unclipped, to be unscaled or clipped, to be divided, or bad and replaced.
struct KeepGradient {
  template <class T>
  OGC_HOST_DEVICE T operator()(T g, const ScaleOp<T>&) const { return g; }
};
struct MultiplyGradient {
  template <class T>
  OGC_HOST_DEVICE T operator()(T g, const ScaleOp<T>& op) const { return g * op.a * op.b; }
};
struct DivideGradient {
  template <class T>
  OGC_HOST_DEVICE T operator()(T g, const ScaleOp<T>& op) const { return g / op.a; }
};
struct FillGradient {
  template <class T>
  OGC_HOST_DEVICE T operator()(T, const ScaleOp<T>& op) const { return op.a; }
};

// `f(Change{})` with the change that an op of this mode makes.
template <class F>
static inline OGC_HOST_DEVICE void with_gradient_change(Mode mode, F f) {
  switch (mode) {
    case Mode::kKeep: return f(KeepGradient{});
    case Mode::kDivide: return f(DivideGradient{});
    case Mode::kFill: return f(FillGradient{});
    default: return f(MultiplyGradient{});
  }
}

static inline OGC_HOST_DEVICE float square_root(float x) { return sqrtf(x); }
static inline OGC_HOST_DEVICE double square_root(double x) { return sqrt(x); }

// m, v and p after a step of gradient g, each term rounded once.
template <class T>
static inline OGC_HOST_DEVICE void adamw(T g, const Coefficients<T>& of, bool decays, T& m, T& v, T& p) {
  m = of.b1 * m + of.one_minus_b1 * g;
  v = of.b2 * v + of.one_minus_b2 * (g * g);
  T update = m / of.correction1 / (square_root(v / of.correction2 + of.eps_root) + of.eps);
  if (decays) update += of.weight_decay * p;
  p -= of.learning_rate * update;
}

}  // namespace globalclip
