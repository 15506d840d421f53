// Sums of squares, norm and judgement: the arithmetic of clipping, shared by every native path, host and device.
//
// Everything here is `static inline`, so that a file compiled for a wider instruction set never lends its code to a
// narrower one through the linker.
#pragma once

#include <cfloat>

#include "elements.h"

namespace globalclip {

// ---------------------------------------------------------------------------------------------------------------------
// Sums of squares

// Float64 elements are binned by magnitude, so that neither 1e200 nor 1e-200 leaves the range when squared (Blue 1978).
// Elements of the narrower types all go to `mid`: their squares lie between 2^-298 and 2^256, and are exact in float64.
constexpr double kBig = 0x1p+480;      // above: scaled by 2^-600
constexpr double kSmall = 0x1p-480;    // below: scaled by 2^+600
constexpr double kDown = 0x1p-600;
constexpr double kUp = 0x1p+600;

// What one chunk contributes. 32 bytes; written by one thread. An infinite element makes a bin infinite, a NaN one NaN.
struct alignas(16) SumSquares {
  double big, mid, small;
  int64_t nonfinite;
};

// A float64 sum with its rounding error beside it (Knuth's two-sum): combining thousands of chunks loses nothing.
struct Compensated {
  double hi, lo;
  OGC_HOST_DEVICE void add(double x) {
    const double sum = hi + x, part = sum - hi;
    lo += (hi - (sum - part)) + (x - part);
    hi = sum;
  }
  OGC_HOST_DEVICE void add(const Compensated& other) {
    add(other.hi);
    lo += other.lo;
  }
};

struct Total {
  Compensated big, mid, small;
  int64_t nonfinite;
  OGC_HOST_DEVICE void add(const SumSquares& x) {
    big.add(x.big);
    mid.add(x.mid);
    small.add(x.small);
    nonfinite += x.nonfinite;
  }
  OGC_HOST_DEVICE void add(const Total& x) {
    big.add(x.big);
    mid.add(x.mid);
    small.add(x.small);
    nonfinite += x.nonfinite;
  }
};

// (hi + lo) * 4^exponent, hi in [1, 4): a sum of squares of any magnitude. Where hi is 0 the exponent says which sum it
// is. Neither NaN nor infinity is ever held, so that the largest exponent of several rows tells of both.
struct Normalized {
  double hi, lo;
  int exponent;
};
constexpr int kZeroExponent = -4096;     // of an empty or zero sum: below every other, so that a maximum passes it over
constexpr int kInfiniteExponent = 8192;  // above that of every number
constexpr int kNanExponent = 16384;

static inline OGC_HOST_DEVICE Normalized normalize(const Total& total) {
  Compensated sum;
  int exponent = 0;
  if (total.big.hi != 0) {
    sum = total.big;
    sum.add(total.mid.hi * kDown * kDown);
    exponent = 600;
  } else if (total.mid.hi != 0) {
    sum = total.mid;
    sum.add(total.small.hi * kDown * kDown);
  } else {
    sum = total.small;
    exponent = -600;
  }
  // `lo` is NaN then, also beside an infinity.
  if (!(sum.hi - sum.hi == 0)) return {0, 0, sum.hi == sum.hi ? kInfiniteExponent : kNanExponent};
  const double value = sum.hi + sum.lo;
  if (value == 0) return {0, 0, kZeroExponent};
  int power;
  frexp(value, &power);              // value in [2^(power-1), 2^power)
  const int e = (power - 1) >> 1;    // floor, so value / 4^e is in [1, 4)
  const double grain = ldexp(1.0, -2 * e);
  const double error = sum.hi - value + sum.lo;
  return {value * grain, error * grain, exponent + e};
}

// What a tree's elements are beside their sum. The same bits in whichever order chunks are added.
struct alignas(16) Extremes {
  double largest;  // magnitude of all elements that are not NaN
  int64_t zeros;   // elements equal to zero
  OGC_HOST_DEVICE void add(const Extremes& x) {
    largest = x.largest > largest ? x.largest : largest;
    zeros += x.zeros;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Norm and judgement

enum class OnNonfinite : uint8_t { kPropagate = 0, kZero = 1 };

// What becomes of an element x, in T (float32, or float64 where the tree has a float64 leaf). The mode is the judgement
// of the norm: who asks whether a tree was clipped, or was bad, reads it.
enum class Mode : int32_t {
  kKeep = 0,     // at or below the threshold, not scaled: x, bit for bit
  kUnscale = 1,  // at or below: x * a * b, a power of two
  kDivide = 2,   // at or below: x / a
  kClip = 3,     // above the threshold: x * a * b
  kFill = 4,     // bad: a
};

template <class T>
struct ScaleOp {  // three numbers of T in a row: (mode, a, b)
  T mode;
  T a;
  T b;
  OGC_HOST_DEVICE Mode kind() const { return static_cast<Mode>(static_cast<int32_t>(mode)); }
};

template <class T>
static inline OGC_HOST_DEVICE ScaleOp<T> make_op(Mode mode, double a, double b) {
  return {static_cast<T>(mode), static_cast<T>(a), static_cast<T>(b)};
}

// x * mantissa * 2^exponent by two factors, both normal where the product is not.
template <class T>
static inline OGC_HOST_DEVICE ScaleOp<T> multiply_op(Mode mode, double mantissa, int exponent) {
  const int limit = sizeof(T) == 4 ? 120 : 1000;
  const int half = exponent > limit || exponent < -limit ? exponent / 2 : 0;
  return make_op<T>(mode, ldexp(mantissa, exponent - half), ldexp(1.0, half));
}

// Like an infinite scale a subnormal one is refused: elsewhere it counts as zero.
static inline OGC_HOST_DEVICE bool usable_loss_scale(float loss_scale) {
  return loss_scale >= FLT_MIN && loss_scale - loss_scale == 0;
}
template <class T>
static inline OGC_HOST_DEVICE bool usable_threshold(T max_norm) { return max_norm >= 0; }  // not NaN, and -0 is 0

template <class T>
struct NormAndOp {
  T norm;
  ScaleOp<T> op;
};

template <class T>
static inline OGC_HOST_DEVICE T smallest_normal() { return static_cast<T>(sizeof(T) == 4 ? FLT_MIN : DBL_MIN); }

// From the sum of squares of the gradients of loss_scale * loss: their norm in true units, and what to do to each of
// them. `any_nonfinite` speaks of the whole tree, also where every leaf has a norm of its own. A step that is skipped
// records a norm of infinity, never NaN.
template <class T>
static inline OGC_HOST_DEVICE NormAndOp<T> finish(const Normalized& sum, bool any_nonfinite, T max_norm,
                                                  float loss_scale, OnNonfinite on_nonfinite) {
  const bool zeroes = on_nonfinite == OnNonfinite::kZero, good_scale = usable_loss_scale(loss_scale);
  int scale_exponent = 0;
  const double scale_mantissa = frexp(static_cast<double>(loss_scale), &scale_exponent);
  double root = sqrt(sum.hi);                          // in [1, 2), or 0
  if (root > 0) root += sum.lo / (2 * root);
  T norm = static_cast<T>(root == 0 ? 0.0 : ldexp(root / scale_mantissa, sum.exponent - scale_exponent));
  if (norm < smallest_normal<T>()) norm = 0;           // to XLA on the CPU: what reads it must not divide by it
  if (sum.exponent == kInfiniteExponent) norm = static_cast<T>(INFINITY);
  if (sum.exponent == kNanExponent || !good_scale) norm = static_cast<T>(zeroes ? INFINITY : NAN);

  if (any_nonfinite || !good_scale || !usable_threshold(max_norm))
    return {norm, make_op<T>(Mode::kFill, zeroes ? 0.0 : NAN, 0)};
  if (norm <= max_norm) {
    if (loss_scale == 1) return {norm, make_op<T>(Mode::kKeep, 1, 1)};
    if (scale_mantissa == 0.5) return {norm, multiply_op<T>(Mode::kUnscale, 1.0, 1 - scale_exponent)};
    return {norm, make_op<T>(Mode::kDivide, loss_scale, 1)};
  }
  // (g / s) * (max / (|g| / s)): the loss scale cancels.
  int max_exponent;
  const double max_mantissa = frexp(fabs(static_cast<double>(max_norm)), &max_exponent);  // 0 for -0
  return {norm, multiply_op<T>(Mode::kClip, max_mantissa / root, max_exponent - sum.exponent)};
}

// ---------------------------------------------------------------------------------------------------------------------
// What stage 2 writes

struct NormOperands {
  const int32_t* counted;  // a leaf: 0 where it does not count; or null, where all do
  const void* max_norm;
  const float* loss_scale;
  void* rows;
  int32_t* nonfinite;
  void* norms;
  void* ops;
  void* extremes;  // or null, where they are not wanted
  int32_t num_leaves;
  OnNonfinite on_nonfinite;
  DType dtype;      // of the norm
  bool per_leaf;    // whether each leaf is judged by a norm of its own
  bool leaf_norms;  // whether the numbers of each leaf are wanted too
};

static inline OGC_HOST_DEVICE int32_t saturated(int64_t count) {
  return count < INT32_MAX ? static_cast<int32_t>(count) : INT32_MAX;
}

// The numbers of the whole tree, `index` 0, or of leaf `index - 1`.
template <class T>
static inline OGC_HOST_DEVICE void put_numbers(int64_t index, const Total& total, bool any_nonfinite,
                                               const NormOperands& operands) {
  const Normalized sum = normalize(total);
  const NormAndOp<T> finished = finish<T>(sum, any_nonfinite, *static_cast<const T*>(operands.max_norm),
                                          *operands.loss_scale, operands.on_nonfinite);
  T* const row = static_cast<T*>(operands.rows) + 3 * index;
  row[0] = static_cast<T>(sum.hi);
  row[1] = static_cast<T>(sum.hi - static_cast<double>(row[0]) + sum.lo);
  row[2] = static_cast<T>(sum.exponent);
  operands.nonfinite[index] = saturated(total.nonfinite);
  static_cast<T*>(operands.norms)[index] = finished.norm;
  if (index == 0 || operands.per_leaf) static_cast<ScaleOp<T>*>(operands.ops)[index] = finished.op;
}

template <class T>
static inline OGC_HOST_DEVICE void put_extremes(const Extremes& extremes, const NormOperands& operands) {
  static_cast<T*>(operands.extremes)[0] = static_cast<T>(extremes.largest);
  static_cast<T*>(operands.extremes)[1] = static_cast<T>(extremes.zeros);
}

// ---------------------------------------------------------------------------------------------------------------------
// What stage 3 does

struct ScaleOperands {
  const void* ops;  // one, or one a leaf
  DType dtype;      // of the ops
  bool per_leaf;
};

// Stage 3 by what stage 2 wrote: behind the tree's op comes one a leaf, with `per_leaf`.
static inline ScaleOperands scale_operands(const NormOperands& operands) {
  const int64_t tree_op = operands.per_leaf ? 3 * element_bytes(operands.dtype) : 0;
  return {static_cast<const char*>(operands.ops) + tree_op, operands.dtype, operands.per_leaf};
}

// One element through stage 3: computed in T, rounded once to the element's own type.
template <class In>
static inline OGC_HOST_DEVICE In multiply(In x, const ScaleOp<float>& op) {
  return from_float<In>(to_float(x) * op.a * op.b);
}
template <class In>
static inline OGC_HOST_DEVICE In multiply(In x, const ScaleOp<double>& op) {
  return from_double<In>(to_double(x) * op.a * op.b);
}
// A quotient of two floats rounded to float64 and then to a narrower type is the quotient rounded once (53 >= 2 * 24 + 2).
template <class In, class T>
static inline OGC_HOST_DEVICE In divide(In x, const ScaleOp<T>& op) {
  return from_double<In>(to_double(x) / static_cast<double>(op.a));
}

}  // namespace globalclip
