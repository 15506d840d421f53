// Compiled once for each instruction set, with OGC_CPU_KERNELS naming the table it defines.
//
// Element i of a chunk always goes to accumulator i % kLanes, and the accumulators are always added in the same order:
// the sum does not depend on the width of the machine's vectors. -ffp-contract=off keeps it so for float64 elements.
#include "kernels_cpu.h"

namespace globalclip {
namespace {

constexpr int kLanes = 32;
constexpr int kPrefetchBytes = 1024;  // ahead: a tree larger than the cache is then read as fast as memory gives it
constexpr int kWidth = 4;  // elements a vector: float64 ones fill a register of AVX2
typedef float Floats __attribute__((vector_size(kWidth * sizeof(float))));
typedef double Doubles __attribute__((vector_size(kWidth * sizeof(double))));
typedef uint32_t Words __attribute__((vector_size(kWidth * sizeof(uint32_t))));
typedef uint16_t Halves __attribute__((vector_size(kWidth * sizeof(uint16_t))));

template <class Vector, class Element>
inline Vector load(const Element* x) {
  Vector v;
  static_assert(sizeof v == kWidth * sizeof *x, "one vector");
  memcpy(&v, x, sizeof v);
  return v;
}

inline Floats load_floats(const float* x) { return load<Floats>(x); }
inline Floats load_floats(const BF16* x) {
  return (Floats)(__builtin_convertvector(load<Halves>(x), Words) << 16);
}
inline Floats load_floats(const F16* x) {
#ifdef __F16C__
  return (Floats)_mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
#else
  Floats v;
  for (int i = 0; i < kWidth; ++i) v[i] = to_float(x[i]);
  return v;
#endif
}

inline void store_floats(float* x, Floats v) { memcpy(x, &v, sizeof v); }
inline void store_floats(BF16* x, Floats v) {
  const Words bits = (Words)v;
  const Words rounded = bits + 0x7fffu + (bits >> 16 & 1u), quiet = bits | 0x400000u;
  const Words nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
  const Halves halves = __builtin_convertvector(((nan & quiet) | (~nan & rounded)) >> 16, Halves);
  memcpy(x, &halves, sizeof halves);
}
inline void store_floats(F16* x, Floats v) {
#ifdef __F16C__
  _mm_storel_epi64(reinterpret_cast<__m128i*>(x), _mm_cvtps_ph((__m128)v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kWidth; ++i) x[i] = from_float<F16>(v[i]);
#endif
}

template <class In>
inline Doubles load_doubles(const In* x) {
#ifdef __AVX__
  return (Doubles)_mm256_cvtps_pd((__m128)load_floats(x));  // what __builtin_convertvector does in six instructions
#else
  return __builtin_convertvector(load_floats(x), Doubles);
#endif
}
inline Doubles load_doubles(const double* x) { return load<Doubles>(x); }

double sum_lanes(const Doubles* lanes) {
  Doubles sum = {};
  for (int j = 0; j < kLanes / kWidth; ++j) sum += lanes[j];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

template <class In>
int64_t count_nonfinite(const In* x, int64_t size) {
  int64_t count = 0;
  for (int64_t i = 0; i < size; ++i) {
    const double v = to_double(x[i]);
    count += !(v - v == 0);
  }
  return count;
}

// Squares of the narrow types are exact in float64 and their sum cannot overflow: it is finite if every element is.
template <class In>
SumSquares sum_squares(const In* x, int64_t size) {
  Doubles lanes[kLanes / kWidth] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    __builtin_prefetch(reinterpret_cast<const char*>(x + i) + kPrefetchBytes);
    __builtin_prefetch(reinterpret_cast<const char*>(x + i) + kPrefetchBytes + 64);
#pragma GCC unroll 8
    for (int j = 0; j < kLanes / kWidth; ++j) {
      const Doubles v = load_doubles(x + i + j * kWidth);
      lanes[j] += v * v;
    }
  }
  for (int j = 0; i < size; ++i, ++j) {
    const double v = to_double(x[i]);
    lanes[j / kWidth][j % kWidth] += v * v;
  }
  const double sum = sum_lanes(lanes);
  return {0, sum, 0, sum - sum == 0 ? 0 : count_nonfinite(x, size)};
}

inline Doubles select(Doubles condition, Doubles yes, Doubles no) {
  typedef int64_t Mask __attribute__((vector_size(sizeof(Doubles))));
  return (Doubles)(((Mask)condition & (Mask)yes) | (~(Mask)condition & (Mask)no));
}

SumSquares sum_squares(const double* x, int64_t size) {
  Doubles big[kLanes / kWidth] = {}, mid[kLanes / kWidth] = {}, small[kLanes / kWidth] = {};
  const Doubles zero = {};
  for (int64_t i = 0; i < size; i += kLanes)
    for (int j = 0; j < kLanes / kWidth; ++j) {
      const int64_t at = i + j * kWidth, rest = size - at;
      Doubles v = {};
      if (rest >= kWidth) v = load_doubles(x + at);
      else if (rest > 0) memcpy(&v, x + at, rest * sizeof *x);
      const Doubles magnitude = v < 0 ? -v : v;
      const Doubles is_big = (Doubles)(magnitude > kBig), is_small = (Doubles)(magnitude < kSmall);
      const Doubles down = v * kDown, up = v * kUp;
      big[j] += select(is_big, down * down, zero);
      small[j] += select(is_small, up * up, zero);
      mid[j] += select(is_big, zero, select(is_small, zero, v * v));
    }
  const SumSquares sum = {sum_lanes(big), sum_lanes(mid), sum_lanes(small), 0};
  const double all = sum.big + sum.mid;
  return {sum.big, sum.mid, sum.small, all - all == 0 ? 0 : count_nonfinite(x, size)};
}

SumSquares sum_squares_of_chunk(const Chunk& chunk) {
  return with_element_type(chunk.dtype, [&](auto tag) {
    return sum_squares(static_cast<const decltype(tag)*>(chunk.data), chunk.size);
  });
}

template <class In, class T>
void scale(In* x, int64_t size, const ScaleOp<T>& op) {
  switch (op.kind()) {
    case Mode::kKeep: return;
    case Mode::kFill: {
      const In fill = from_double<In>(op.a);
      for (int64_t i = 0; i < size; ++i) x[i] = fill;
      return;
    }
    case Mode::kDivide:
      for (int64_t i = 0; i < size; ++i) x[i] = divide(x[i], op);
      return;
    case Mode::kMultiply: {
      int64_t i = 0;
      if constexpr (sizeof(T) == sizeof(float))
        for (; i + kWidth <= size; i += kWidth) store_floats(x + i, load_floats(x + i) * op.a * op.b);
      for (; i < size; ++i) x[i] = multiply(x[i], op);
      return;
    }
  }
}

void scale_float(const Chunk& chunk, const ScaleOp<float>& op) {
  switch (chunk.dtype) {
    case DType::kF16: return scale(static_cast<F16*>(chunk.data), chunk.size, op);
    case DType::kBF16: return scale(static_cast<BF16*>(chunk.data), chunk.size, op);
    case DType::kF32: return scale(static_cast<float*>(chunk.data), chunk.size, op);
    case DType::kF64: return;  // a tree with a float64 leaf has a float64 op
  }
}

void scale_double(const Chunk& chunk, const ScaleOp<double>& op) {
  with_element_type(chunk.dtype,
                    [&](auto tag) { scale(static_cast<decltype(tag)*>(chunk.data), chunk.size, op); });
}

}  // namespace

const CpuKernels OGC_CPU_KERNELS = {sum_squares_of_chunk, scale_float, scale_double};

}  // namespace globalclip
