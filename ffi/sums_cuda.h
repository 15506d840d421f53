// Sums of squares of one thread of a GPU: what k_grad_norm_partial does with a chunk before threads meet.
#pragma once

#include "clip_math.h"

namespace globalclip {
namespace {

constexpr int kThreads = 256;  // of a block of the two streaming kernels
constexpr int kLoads = 4;      // independent 16-byte loads that a thread has in flight
constexpr int kTile = kThreads * kLoads;  // vectors

// ---------------------------------------------------------------------------------------------------------------------
// Vectors: a chunk is read in pieces of 16 bytes, the last of which may be short. Piece i is thread i % kThreads's.

template <class In>
struct Vector {
  static constexpr int kSize = 16 / sizeof(In);
  In x[kSize];
};

template <class In>
__device__ __forceinline__ Vector<In> load(const In* x) {
  return bit_cast<Vector<In>>(*reinterpret_cast<const uint4*>(x));
}
template <class In>
__device__ __forceinline__ void store(In* x, const Vector<In>& v) {
  *reinterpret_cast<uint4*>(x) = bit_cast<uint4>(v);
}

// The elements of one chunk, seen as vectors.
template <class In>
struct Vectors {
  In* x;
  int size;   // elements
  int whole;  // vectors that may be moved as 16 bytes: none where the chunk does not start at such an address
  int count;  // vectors, the short one included

  __device__ explicit Vectors(const Chunk& chunk)
      : x(static_cast<In*>(chunk.data)),
        size(static_cast<int>(chunk.size)),
        whole(reinterpret_cast<uintptr_t>(chunk.data) % 16 == 0 ? size / Vector<In>::kSize : 0),
        count((size + Vector<In>::kSize - 1) / Vector<In>::kSize) {}

  __device__ In* at(int i) const { return x + i * Vector<In>::kSize; }

  // Vector i, element by element, with zeros for what is not there.
  __device__ Vector<In> gather(int i) const {
    Vector<In> v{};
    const int rest = size - i * Vector<In>::kSize;
#pragma unroll
    for (int e = 0; e < Vector<In>::kSize; ++e)
      if (e < rest) v.x[e] = at(i)[e];
    return v;
  }
  __device__ Vector<In> get(int i) const { return i < whole ? load(at(i)) : gather(i); }
};

// ---------------------------------------------------------------------------------------------------------------------
// Accumulators
//
// Float32 arithmetic alone, where a float64 accumulator would do: converting every element to float64 and adding it
// there is bound by the float64 units and not by memory on every GPU that has few of them (1/64 of the float32 rate on
// sm_75, 86, 89, 103 and 120). A running sum is a pair (hi, lo): hi the rounded sum, lo the sum of the errors of its
// additions (two-sum), among them what a square or a pair of squares lost. It is off by less than 2^-40 of itself, and
// by 2^-24 where two squares of a half type were added before they entered it: half an ulp of a float32 norm at most. A
// float64 norm takes float64 sums.
struct FloatSum {
  float hi[kLoads], lo[kLoads];  // one pair for each load in flight
  uint32_t seen;                 // the bits of all elements, or-ed

  // `part` of `sum` is what came to hi, and `rest` what that fell short of.
  __device__ void enter(int j, float sum, float part, float rest) {
    lo[j] += (hi[j] - (sum - part)) + rest;
    hi[j] = sum;
  }
  // One float32, or two halves.
  __device__ void add(int j, uint32_t word, float) {
    const float x = bit_cast<float>(word);
    const float sum = fmaf(x, x, hi[j]), part = sum - hi[j];
    enter(j, sum, part, fmaf(x, x, -part));
  }
  template <class Half>
  __device__ void add(int j, uint32_t word, Half) {
    const float x = to_float(Half{static_cast<uint16_t>(word)}), y = to_float(Half{static_cast<uint16_t>(word >> 16)});
    const float square = fmaf(y, y, x * x);  // x * x is exact: at most 22 bits
    const float sum = hi[j] + square, part = sum - hi[j];
    enter(j, sum, part, square - part);
  }
  template <class In>
  __device__ void add(int j, const Vector<In>& v) {
    const uint4 words = bit_cast<uint4>(v);
    add(j, words.x, In{});
    add(j, words.y, In{});
    add(j, words.z, In{});
    add(j, words.w, In{});
    seen |= words.x | words.y | words.z | words.w;
  }

  // What float32 may have lost on the way is below 2^-140: nothing beside 2^-100. A sum that overflowed, holds a
  // non-finite element or is smaller, though not of zeros, has to be taken again.
  template <class In>
  __device__ bool lost() const {
    const uint32_t signs = sizeof(In) == sizeof(float) ? 0x80000000u : 0x80008000u;
    const float sum = (hi[0] + hi[1]) + (hi[2] + hi[3]);
    return (seen & ~signs) != 0 && !(sum >= 0x1p-100f && sum - sum == 0);
  }
  __device__ SumSquares sum() const {
    double total = 0;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) total += static_cast<double>(hi[j]) + static_cast<double>(lo[j]);
    return {0, total, 0, 0};
  }
};

// Float64 elements, and the others where float32 does not reach: binned by magnitude, so that no square overflows.
struct DoubleSum {
  SumSquares total;

  template <class In>
  __device__ void add(int, const Vector<In>& v) {
#pragma unroll
    for (int e = 0; e < Vector<In>::kSize; ++e) {
      const double x = to_double(v.x[e]), magnitude = fabs(x);
      total.nonfinite += !(magnitude - magnitude == 0);
      if (sizeof(In) == sizeof(double) && magnitude > kBig) total.big += x * kDown * (x * kDown);
      else if (sizeof(In) == sizeof(double) && magnitude < kSmall) total.small += x * kUp * (x * kUp);
      else total.mid += x * x;
    }
  }
};

// Sees the elements on their way into a sum. Where nobody asks for extremes it is nothing.
struct NoExtremes {
  template <class In>
  __device__ void add(const Vector<In>&) {}
};

struct ThreadExtremes {
  float largest;           // fmax passes NaN over
  double largest_float64;  // of float64 elements
  int32_t nonzeros;        // not zeros: a short vector is filled with them

  template <class In>
  __device__ void add(const Vector<In>& v) {
#pragma unroll
    for (int e = 0; e < Vector<In>::kSize; ++e) {
      if constexpr (sizeof(In) == sizeof(double)) {
        largest_float64 = fmax(largest_float64, fabs(v.x[e]));
        nonzeros += v.x[e] != 0;
      } else {
        const float x = to_float(v.x[e]);
        largest = fmaxf(largest, fabsf(x));
        nonzeros += x != 0;
      }
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// A thread's share of a chunk

template <class Sum, class In, class OfThread>
__device__ __forceinline__ Sum sum_of_thread(const Vectors<In>& vectors, OfThread* extremes) {
  const int tid = static_cast<int>(threadIdx.x);
  Sum sum{};
  *extremes = {};
  int base = 0;
  for (; base + kTile <= vectors.whole; base += kTile) {
    Vector<In> v[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) v[j] = load(vectors.at(base + j * kThreads + tid));
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      sum.add(j, v[j]);
      extremes->add(v[j]);
    }
  }
  for (; base < vectors.count; base += kTile)
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int i = base + j * kThreads + tid;
      if (i >= vectors.count) continue;
      const Vector<In> v = vectors.get(i);
      sum.add(j, v);
      extremes->add(v);
    }
  return sum;
}

template <class In, class OfThread>
__device__ SumSquares sum_squares(const Chunk& chunk, DType dtype, OfThread* extremes) {
  const Vectors<In> vectors(chunk);
  if constexpr (sizeof(In) < sizeof(double)) {
    if (dtype == DType::kF32) {
      const FloatSum sum = sum_of_thread<FloatSum>(vectors, extremes);
      if (!sum.lost<In>()) return sum.sum();
    }
  }
  return sum_of_thread<DoubleSum>(vectors, extremes).total;
}

}  // namespace
}  // namespace globalclip
