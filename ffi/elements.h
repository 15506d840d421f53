// Elements: the types of the leaves' elements, and how they are read as numbers and rounded back, host and device.
//
// Everything here is `static inline`, so that a file compiled for a wider instruction set never lends its code to a
// narrower one through the linker.
#pragma once

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

}  // namespace globalclip
