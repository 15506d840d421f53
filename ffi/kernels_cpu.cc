// Compiled once for each instruction set, with OGC_CPU_KERNELS naming the table it defines.
//
// Element i of a chunk always goes to accumulator i % kLanes, and the accumulators are always added in the same order:
// the sum does not depend on the width of the machine's vectors. -ffp-contract=off keeps it so for float64 elements.
#include "kernels_cpu.h"

#include <limits>
#include <type_traits>

namespace globalclip {
namespace {

constexpr int kLanes = 32;
constexpr int kPrefetchBytes = 2048;  // ahead: a tree larger than the cache is then read as fast as memory gives it

// What takes a register of AVX2: 8 floats, 4 doubles.
constexpr int kFloats = 8, kDoubles = 4;
template <class Element, int size>
struct VectorOf { typedef Element type __attribute__((vector_size(size * sizeof(Element)))); };
template <class Element, int size>
using Vector = typename VectorOf<Element, size>::type;
using Doubles = Vector<double, kDoubles>;
using Masks = Vector<int64_t, kDoubles>;  // of a comparison: -1 where it holds

template <int size, class Element>
inline Vector<Element, size> load(const Element* x) {
  Vector<Element, size> v;
  memcpy(&v, x, sizeof v);
  return v;
}

template <int size>
inline Vector<float, size> load_floats(const float* x) { return load<size>(x); }
template <int size>
inline Vector<float, size> load_floats(const BF16* x) {
  const Vector<uint16_t, size> bits = load<size>(reinterpret_cast<const uint16_t*>(x));
  return (Vector<float, size>)(__builtin_convertvector(bits, Vector<uint32_t, size>) << 16);
}
template <int size>
inline Vector<float, size> load_floats(const F16* x) {
#ifdef __F16C__
  if constexpr (size == 8) return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
  else return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(x)));
#else
  Vector<float, size> v;
  for (int i = 0; i < size; ++i) v[i] = to_float(x[i]);
  return v;
#endif
}

using Floats = Vector<float, kFloats>;
inline void store_floats(float* x, Floats v) { memcpy(x, &v, sizeof v); }
inline void store_floats(BF16* x, Floats v) {
  using Words = Vector<uint32_t, kFloats>;
  const Words bits = (Words)v;
  const Words rounded = bits + 0x7fffu + (bits >> 16 & 1u), quiet = bits | 0x400000u;
  const Words nan = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
  const auto halves = __builtin_convertvector(((nan & quiet) | (~nan & rounded)) >> 16, Vector<uint16_t, kFloats>);
  memcpy(x, &halves, sizeof halves);
}
inline void store_floats(F16* x, Floats v) {
#ifdef __F16C__
  _mm_storeu_si128(reinterpret_cast<__m128i*>(x), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kFloats; ++i) x[i] = from_float<F16>(v[i]);
#endif
}

template <class In>
inline Doubles load_doubles(const In* x) {
#ifdef __AVX__
  return _mm256_cvtps_pd(load_floats<kDoubles>(x));  // what __builtin_convertvector does in six instructions
#else
  return __builtin_convertvector(load_floats<kDoubles>(x), Doubles);
#endif
}
inline Doubles load_doubles(const double* x) { return load<kDoubles>(x); }

// At element i: asks for kLanes elements that lie kPrefetchBytes ahead, behind the end of `x` in what comes `next`.
template <class In>
inline void prefetch(const In* x, int64_t i, int64_t size, const void* next) {
  const int64_t beyond = kPrefetchBytes - (size - i) * static_cast<int64_t>(sizeof *x);
  const char* const at =
      beyond < 0 ? reinterpret_cast<const char*>(x + i) + kPrefetchBytes : static_cast<const char*>(next) + beyond;
  for (size_t line = 0; line < kLanes * sizeof *x; line += 64) __builtin_prefetch(at + line);
}

// `sum + v * v` where the square is exact, so that it does not matter whether it is rounded before it is added.
inline Doubles add_exact_square(Doubles sum, Doubles v) {
#ifdef __FMA__
  return _mm256_fmadd_pd(v, v, sum);
#else
  return sum + v * v;
#endif
}

inline Doubles select(Masks condition, Doubles yes, Doubles no) {
  return (Doubles)((condition & (Masks)yes) | (~condition & (Masks)no));
}

double sum_lanes(const Doubles* lanes) {
  Doubles sum = {};
  for (int j = 0; j < kLanes / kDoubles; ++j) sum += lanes[j];
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

// A sum in every lane: plain within a block, with the rounding errors beside it (two-sum) from block to block.
struct LaneSums {
  Doubles block[kLanes / kDoubles] = {}, hi[kLanes / kDoubles] = {}, lo[kLanes / kDoubles] = {};

  void end_block() {
    for (int j = 0; j < kLanes / kDoubles; ++j) {
      const Doubles sum = hi[j] + block[j], part = sum - hi[j];
      lo[j] += (hi[j] - (sum - part)) + (block[j] - part);
      hi[j] = sum;
      block[j] = Doubles{};
    }
  }
  double total() {
    end_block();
    const double sum = sum_lanes(hi);
    return sum - sum == 0 ? sum + sum_lanes(lo) : sum;  // beside an infinity `lo` is NaN
  }
};

// Sees the elements on their way into a sum. Where nobody asks for extremes it is nothing.
struct NoExtremes {
  template <class Numbers>
  void add(Numbers) {}
};

// `Word`: an integer as long as a `Number`.
template <class Number, class Word, int kSize>
struct LaneExtremes {
  using Numbers = Vector<Number, kSize>;
  using Words = Vector<Word, kSize>;
  Numbers largest = {};
  Words nonzeros = {};  // less, by one for each

  void add(Numbers v) {
    const Numbers magnitude = (Numbers)((Words)v & std::numeric_limits<Word>::max());
    largest = magnitude > largest ? magnitude : largest;  // no for NaN
    nonzeros += v != 0;
  }
  // Of `size` elements: those that fill a vector are zeros.
  Extremes total(int64_t size) const {
    Extremes all = {0, size};
    for (int j = 0; j < kSize; ++j) all.add({largest[j], nonzeros[j]});
    return all;
  }
};

// Squares of the narrow types are exact in float64 and their sum cannot overflow: it is finite if every element is.
template <class In, class OfLanes>
SumSquares sum_squares(const In* x, int64_t size, const void* next, OfLanes* result) {
  LaneSums sums;
  OfLanes extremes;
  int64_t i = 0;
  for (const int64_t whole = size - size % kLanes; i < whole;) {
    Doubles lanes[kLanes / kDoubles] = {};
    const int64_t end = whole - i < 64 * kLanes ? whole : i + 64 * kLanes;
    for (; i < end; i += kLanes) {
      prefetch(x, i, size, next);
#pragma GCC unroll 8
      for (int j = 0; j < kLanes / kDoubles; ++j)
        lanes[j] = add_exact_square(lanes[j], load_doubles(x + i + j * kDoubles));
      for (int j = 0; j < kLanes; j += kFloats) extremes.add(load_floats<kFloats>(x + i + j));
    }
    memcpy(sums.block, lanes, sizeof lanes);
    sums.end_block();
  }
  for (int j = 0; i < size; ++i, ++j) {
    const double v = to_double(x[i]);
    sums.block[j / kDoubles][j % kDoubles] += v * v;
    extremes.add(Floats{static_cast<float>(v)});
  }
  *result = extremes;
  const double sum = sums.total();
  return {0, sum, 0, sum - sum == 0 ? 0 : count_nonfinite(x, size)};
}

template <class OfLanes>
SumSquares sum_squares(const double* x, int64_t size, const void* next, OfLanes* result) {
  LaneSums big, mid, small;
  OfLanes extremes;
  const Doubles zero = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    if (i % (8 * kLanes) == 0)
      for (LaneSums* sums : {&big, &mid, &small}) sums->end_block();
    prefetch(x, i, size, next);
    for (int j = 0; j < kLanes / kDoubles; ++j) {
      const int64_t at = i + j * kDoubles, rest = size - at;
      Doubles v = {};
      if (rest >= kDoubles) v = load_doubles(x + at);
      else if (rest > 0) memcpy(&v, x + at, rest * sizeof *x);
      const Doubles magnitude = v < 0 ? -v : v;
      const Masks is_big = magnitude > kBig, is_small = magnitude < kSmall;
      const Doubles down = v * kDown, up = v * kUp;
      big.block[j] += select(is_big, down * down, zero);
      small.block[j] += select(is_small, up * up, zero);
      mid.block[j] += select(is_big, zero, select(is_small, zero, v * v));
      extremes.add(v);
    }
  }
  *result = extremes;
  const SumSquares sum = {big.total(), mid.total(), small.total(), 0};
  const double all = sum.big + sum.mid;
  return {sum.big, sum.mid, sum.small, all - all == 0 ? 0 : count_nonfinite(x, size)};
}

SumSquares sum_squares_of_chunk(const Chunk& chunk, const void* next) {
  return with_element_type(chunk.dtype, [&](auto tag) {
    NoExtremes none;
    return sum_squares(static_cast<const decltype(tag)*>(chunk.data), chunk.size, next, &none);
  });
}

SumSquares sum_squares_and_extremes(const Chunk& chunk, const void* next, Extremes* extremes) {
  return with_element_type(chunk.dtype, [&](auto tag) {
    using In = decltype(tag);
    std::conditional_t<std::is_same_v<In, double>, LaneExtremes<double, int64_t, kDoubles>,
                       LaneExtremes<float, int32_t, kFloats>> of_lanes;
    const SumSquares sum = sum_squares(static_cast<const In*>(chunk.data), chunk.size, next, &of_lanes);
    *extremes = of_lanes.total(chunk.size);
    return sum;
  });
}

template <class In, class T>
void scale(In* x, int64_t size, const void* next, const ScaleOp<T>& op) {
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
    case Mode::kUnscale:
    case Mode::kClip: {
      const T a = op.a, b = op.b;
      int64_t i = 0;
      if constexpr (sizeof(T) == sizeof(float))
        for (; i + kLanes <= size; i += kLanes) {
          prefetch(x, i, size, next);
          for (int j = 0; j < kLanes; j += kFloats) {
            In* const at = x + i + j;
            store_floats(at, load_floats<kFloats>(at) * a * b);
          }
        }
      for (; i < size; ++i) x[i] = multiply(x[i], op);
      return;
    }
  }
}

void scale_float(const Chunk& chunk, const void* next, const ScaleOp<float>& op) {
  switch (chunk.dtype) {
    case DType::kF16: return scale(static_cast<F16*>(chunk.data), chunk.size, next, op);
    case DType::kBF16: return scale(static_cast<BF16*>(chunk.data), chunk.size, next, op);
    case DType::kF32: return scale(static_cast<float*>(chunk.data), chunk.size, next, op);
    case DType::kF64: return;  // a tree with a float64 leaf has a float64 op
  }
}

void scale_double(const Chunk& chunk, const void* next, const ScaleOp<double>& op) {
  with_element_type(chunk.dtype,
                    [&](auto tag) { scale(static_cast<decltype(tag)*>(chunk.data), chunk.size, next, op); });
}

}  // namespace

const CpuKernels OGC_CPU_KERNELS = {sum_squares_of_chunk, sum_squares_and_extremes, scale_float, scale_double};

}  // namespace globalclip
