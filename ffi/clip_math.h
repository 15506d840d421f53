// Accumulators, factor and rounding: the arithmetic of clipping, shared by every native path, host and device.
//
// Everything here is `static inline`, so that a file compiled for a wider instruction set never lends its code to a
// narrower one through the linker.
#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "leaf_table.h"

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#elif defined(__F16C__)
#include <immintrin.h>
#endif

namespace globalclip {

// ---------------------------------------------------------------------------------------------------------------------
// Elements

struct F16 { uint16_t bits; };
struct BF16 { uint16_t bits; };

template <class To, class From>
static inline OGC_HOST_DEVICE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

static inline OGC_HOST_DEVICE float to_float(float x) { return x; }
static inline OGC_HOST_DEVICE float to_float(BF16 x) { return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }
static inline OGC_HOST_DEVICE float to_float(F16 x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#elif defined(__F16C__) && !defined(__CUDACC__)
  return _cvtsh_ss(x.bits);
#else
  // The exponent is moved by a multiplication, which also normalises subnormals; infinities and NaN keep theirs.
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  const float scaled = bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
  return bit_cast<float>(bit_cast<uint32_t>(scaled) | special | static_cast<uint32_t>(x.bits & 0x8000) << 16);
#endif
}

template <class Out> static inline OGC_HOST_DEVICE Out from_float(float x);
template <> OGC_HOST_DEVICE inline float from_float<float>(float x) { return x; }
template <> OGC_HOST_DEVICE inline BF16 from_float<BF16>(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
#else
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;  // to nearest, ties to even
  return {static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16 | 0x40u) : rounded)};
#endif
}
template <> OGC_HOST_DEVICE inline F16 from_float<F16>(float x) {
#if defined(__CUDA_ARCH__)
  return {__half_as_ushort(__float2half_rn(x))};
#elif defined(__F16C__) && !defined(__CUDACC__)
  return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
  const uint32_t sign = bit_cast<uint32_t>(x) >> 16 & 0x8000u;
  const uint32_t magnitude = bit_cast<uint32_t>(x) & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) half = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  else if (magnitude >= 0x477ff000u) half = 0x7c00u;
  else if (magnitude < 0x38800000u)  // subnormal: adding 0.5 lets the adder round to the fixed grain of 2^-24
    half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  else half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  return {static_cast<uint16_t>(half | sign)};
#endif
}

// Rounds once: through float with the last bit sticky (round to odd), which no later rounding can mistake for a tie.
template <class Out>
static inline OGC_HOST_DEVICE Out from_double(double x) {
  const float nearest = static_cast<float>(x);
  if (sizeof(Out) == sizeof(float) || static_cast<double>(nearest) == x || !(nearest - nearest == 0.0f))
    return from_float<Out>(nearest);
  uint32_t bits = bit_cast<uint32_t>(nearest);
  if (fabs(static_cast<double>(nearest)) > fabs(x)) bits -= 1;
  return from_float<Out>(bit_cast<float>(bits | 1u));
}
template <> OGC_HOST_DEVICE inline double from_double<double>(double x) { return x; }

static inline OGC_HOST_DEVICE double to_double(double x) { return x; }
template <class In>
static inline OGC_HOST_DEVICE double to_double(In x) { return static_cast<double>(to_float(x)); }

// `f(Tag{})` with the element type that `dtype` names.
template <class F>
static inline OGC_HOST_DEVICE auto with_element_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kF16: return f(F16{});
    case DType::kBF16: return f(BF16{});
    case DType::kF32: return f(float{});
    default: return f(double{});
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums of squares

// Float64 elements are binned by magnitude, so that neither 1e200 nor 1e-200 leaves the range when squared (Blue 1978).
// Elements of the narrower types all go to `mid`: their squares lie between 2^-298 and 2^256, and are exact in float64.
constexpr double kBig = 0x1p+480;      // above: scaled by 2^-600
constexpr double kSmall = 0x1p-480;    // below: scaled by 2^+600
constexpr double kDown = 0x1p-600;
constexpr double kUp = 0x1p+600;

// What one chunk contributes. 32 bytes; written by one thread.
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

// (hi + lo) * 4^exponent, hi in [1, 4) or 0: a sum of squares of any magnitude.
struct Normalized {
  double hi, lo;
  int exponent;
};
constexpr int kZeroExponent = -4096;  // of an empty or zero sum: below every other, so that a maximum passes it over

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
  if (!(sum.hi - sum.hi == 0)) return {sum.hi, 0, 0};  // infinite or NaN: `lo` is NaN then, also beside an infinity
  const double value = sum.hi + sum.lo;
  if (value == 0) return {0, 0, kZeroExponent};
  int power;
  frexp(value, &power);              // value in [2^(power-1), 2^power)
  const int e = (power - 1) >> 1;    // floor, so value / 4^e is in [1, 4)
  const double grain = ldexp(1.0, -2 * e);
  const double error = sum.hi - value + sum.lo;
  return {value * grain, error * grain, exponent + e};
}

template <class T>
static inline OGC_HOST_DEVICE void put_sum_row(const Normalized& sum, T* row) {
  row[0] = static_cast<T>(sum.hi);
  row[1] = static_cast<T>(sum.hi - static_cast<double>(row[0]) + sum.lo);
  row[2] = static_cast<T>(sum.exponent);
}

// ---------------------------------------------------------------------------------------------------------------------
// Norm and factor

enum class OnNonfinite : int32_t { kPropagate = 0, kZero = 1 };

// What stage 3 does to an element x, in T (float32, or float64 where the tree has a float64 leaf).
enum class Mode : int32_t { kKeep = 0, kMultiply = 1, kDivide = 2, kFill = 3 };

template <class T>
struct ScaleOp {  // three numbers of T in a row: (mode, a, b)
  T mode;
  T a;  // kMultiply: x * a * b, both normal where the product is not. kDivide: x / a. kFill: a
  T b;
  OGC_HOST_DEVICE Mode kind() const { return static_cast<Mode>(static_cast<int32_t>(mode)); }
};

// mantissa * 2^exponent as two factors of equal exponent, so that neither is subnormal or infinite where x * a * b is not.
template <class T>
static inline OGC_HOST_DEVICE ScaleOp<T> multiply_op(double mantissa, int exponent) {
  const int limit = sizeof(T) == 4 ? 120 : 1000;
  const int half = exponent > limit || exponent < -limit ? exponent / 2 : 0;
  return {static_cast<T>(Mode::kMultiply), static_cast<T>(ldexp(mantissa, exponent - half)),
          static_cast<T>(ldexp(1.0, half))};
}

template <class T>
struct NormAndOp {
  T norm;
  ScaleOp<T> op;
};

// From the sum of squares of the gradients of loss_scale * loss: their norm in true units, and what to do to each of
// them. `any_nonfinite` speaks of the whole tree, also where every leaf has a norm of its own.
template <class T>
static inline OGC_HOST_DEVICE NormAndOp<T> finish(const Normalized& sum, bool any_nonfinite, T max_norm,
                                                  float loss_scale, OnNonfinite on_nonfinite) {
  const T nan = static_cast<T>(NAN);
  const T fill = static_cast<T>(Mode::kFill);
  // Like an infinite scale a subnormal one is refused: elsewhere it counts as zero.
  if (!(loss_scale >= FLT_MIN) || !(loss_scale - loss_scale == 0)) return {nan, {fill, nan, 0}};
  int scale_exponent;
  const double scale_mantissa = frexp(static_cast<double>(loss_scale), &scale_exponent);
  double root = sqrt(sum.hi);                          // in [1, 2), or 0
  if (root > 0) root += sum.lo / (2 * root);
  const double unscaled = root / scale_mantissa;
  const T norm = static_cast<T>(root == 0 ? 0.0 : ldexp(unscaled, sum.exponent - scale_exponent));
  if (!(max_norm >= 0)) return {norm, {fill, nan, 0}};
  if (any_nonfinite) return {norm, {fill, on_nonfinite == OnNonfinite::kZero ? T(0) : nan, 0}};
  if (norm <= max_norm) {
    if (loss_scale == 1) return {norm, {static_cast<T>(Mode::kKeep), 1, 1}};
    if (scale_mantissa == 0.5) return {norm, multiply_op<T>(1.0, 1 - scale_exponent)};  // a power of two: exact
    return {norm, {static_cast<T>(Mode::kDivide), static_cast<T>(loss_scale), 1}};
  }
  // (g / s) * (max / (|g| / s)): the loss scale cancels.
  int max_exponent;
  const double max_mantissa = frexp(fabs(static_cast<double>(max_norm)), &max_exponent);  // 0 for -0
  return {norm, multiply_op<T>(max_mantissa / root, max_exponent - sum.exponent)};
}

// ---------------------------------------------------------------------------------------------------------------------
// What stage 2 writes

struct SumsOperands {
  const int32_t* counted;
  void* sums;
  int32_t* nonfinite;
  DType dtype;
  bool per_leaf;
};

struct NormOperands {
  const void* max_norm;
  const float* loss_scale;
  void* norms;
  int32_t* nonfinite;
  void* ops;
  OnNonfinite on_nonfinite;
  DType dtype;  // of the norm
  bool per_leaf;
  bool leaf_norms;  // whether the norm and the count of each leaf are wanted too
};

static inline OGC_HOST_DEVICE bool counts(const SumsOperands& operands, int64_t leaf) {
  return operands.counted[leaf] != 0;
}
static inline OGC_HOST_DEVICE bool counts(const NormOperands&, int64_t) { return true; }

// Whether there is anything for `put_leaf` to write.
static inline OGC_HOST_DEVICE bool wants_leaves(const SumsOperands& operands) { return operands.per_leaf; }
static inline OGC_HOST_DEVICE bool wants_leaves(const NormOperands& operands) { return operands.leaf_norms; }

static inline OGC_HOST_DEVICE int32_t saturated(int64_t count) {
  return count < INT32_MAX ? static_cast<int32_t>(count) : INT32_MAX;
}

// Of the sum over all leaves that count.
template <class T>
static inline OGC_HOST_DEVICE void put_tree(const Total& all, const SumsOperands& operands) {
  if (operands.per_leaf) return;
  put_sum_row(normalize(all), static_cast<T*>(operands.sums));
  operands.nonfinite[0] = saturated(all.nonfinite);
}
template <class T>
static inline OGC_HOST_DEVICE void put_leaf(int64_t leaf, const Total& total, const Total&,
                                            const SumsOperands& operands) {
  const Total counted = counts(operands, leaf) ? total : Total{};
  put_sum_row(normalize(counted), static_cast<T*>(operands.sums) + 3 * leaf);
  operands.nonfinite[leaf] = saturated(counted.nonfinite);
}

// norms[0] is the tree's, norms[1 + i] leaf i's where they are wanted; one op for all leaves, or one for each.
template <class T>
static inline OGC_HOST_DEVICE NormAndOp<T> finish(const Total& total, const Total& all, const NormOperands& operands) {
  return finish<T>(normalize(total), all.nonfinite > 0, *static_cast<const T*>(operands.max_norm),
                   *operands.loss_scale, operands.on_nonfinite);
}
template <class T>
static inline OGC_HOST_DEVICE void put_tree(const Total& all, const NormOperands& operands) {
  const NormAndOp<T> tree = finish<T>(all, all, operands);
  static_cast<T*>(operands.norms)[0] = tree.norm;
  if (!operands.per_leaf) static_cast<ScaleOp<T>*>(operands.ops)[0] = tree.op;
  if (!operands.leaf_norms) operands.nonfinite[0] = saturated(all.nonfinite);
}
template <class T>
static inline OGC_HOST_DEVICE void put_leaf(int64_t leaf, const Total& total, const Total& all,
                                            const NormOperands& operands) {
  const NormAndOp<T> one = finish<T>(total, all, operands);
  static_cast<T*>(operands.norms)[1 + leaf] = one.norm;
  operands.nonfinite[leaf] = saturated(total.nonfinite);
  if (operands.per_leaf) static_cast<ScaleOp<T>*>(operands.ops)[leaf] = one.op;
}

// ---------------------------------------------------------------------------------------------------------------------
// What stage 3 does

struct ScaleOperands {
  const void* ops;
  DType dtype;  // of the ops
  bool per_leaf;
};

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
