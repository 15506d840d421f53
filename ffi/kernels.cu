// Clipping on a GPU: k_grad_norm_partial, k_grad_norm_final, k_grad_scale, then their launchers.
//
// Every kernel takes all leaves of a table in one launch. Which thread adds which element, and in what order, follows
// from the leaves' sizes and dtypes alone: no atomics, nothing that depends on addresses, on the number of
// multiprocessors or on the order in which blocks run. Results are the same bit for bit from run to run, from GPU to
// GPU, and at every alignment.
#include "kernels.h"

namespace globalclip {
namespace {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

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
// Sums of squares of one thread
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

template <class Sum, class In>
__device__ __forceinline__ Sum sum_of_thread(const Vectors<In>& vectors) {
  const int tid = static_cast<int>(threadIdx.x);
  Sum sum{};
  int base = 0;
  for (; base + kTile <= vectors.whole; base += kTile) {
    Vector<In> v[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) v[j] = load(vectors.at(base + j * kThreads + tid));
#pragma unroll
    for (int j = 0; j < kLoads; ++j) sum.add(j, v[j]);
  }
  for (; base < vectors.count; base += kTile)
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int i = base + j * kThreads + tid;
      if (i < vectors.count) sum.add(j, vectors.get(i));
    }
  return sum;
}

template <class In>
__device__ SumSquares sum_squares(const Chunk& chunk, DType dtype) {
  const Vectors<In> vectors(chunk);
  if constexpr (sizeof(In) < sizeof(double)) {
    if (dtype == DType::kF32) {
      const FloatSum sum = sum_of_thread<FloatSum>(vectors);
      if (!sum.lost<In>()) return sum.sum();
    }
  }
  return sum_of_thread<DoubleSum>(vectors).total;
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums over threads, in a fixed order. `wide` says whether bins other than `mid` can hold anything.

__device__ __forceinline__ double from_lane_below(double x, int offset) {
  return __shfl_down_sync(kAllLanes, x, offset);
}
__device__ __forceinline__ Compensated from_lane_below(const Compensated& x, int offset) {
  return {from_lane_below(x.hi, offset), from_lane_below(x.lo, offset)};
}

__device__ __forceinline__ void add(double& sum, double x) { sum += x; }
__device__ __forceinline__ void add(Compensated& sum, const Compensated& x) { sum.add(x); }

// Of SumSquares or Total. Lane 0 holds the sum.
template <class Sum>
__device__ Sum sum_of_warp(Sum sum, bool wide) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    add(sum.mid, from_lane_below(sum.mid, offset));
    sum.nonfinite += __shfl_down_sync(kAllLanes, static_cast<long long>(sum.nonfinite), offset);
    if (wide) {
      add(sum.big, from_lane_below(sum.big, offset));
      add(sum.small, from_lane_below(sum.small, offset));
    }
  }
  return sum;
}

// Thread 0 holds the sum. `warp_sums` must not be in use by any thread of the block, and is free after a barrier.
template <int kWarps, class Sum>
__device__ Sum sum_of_block(const Sum& of_thread, bool wide, Sum* warp_sums) {
  static_assert(kWarps <= kWarpSize, "one warp adds them");
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const Sum of_warp = sum_of_warp(of_thread, wide);
  if (lane == 0) warp_sums[warp] = of_warp;
  __syncthreads();
  return warp == 0 ? sum_of_warp(lane < kWarps ? warp_sums[lane] : Sum{}, wide) : Sum{};
}

// ---------------------------------------------------------------------------------------------------------------------
// Stage 1. One block a chunk: partials[table.chunk_offset + blockIdx.x], written by thread 0.
// Accumulators: pairs of float32 a thread, or float64 where the norm's `dtype` is; float64 a warp and the block.
__global__ void __launch_bounds__(kThreads)
k_grad_norm_partial(const __grid_constant__ LeafTable table, DType dtype, SumSquares* partials) {
  __shared__ SumSquares warp_sums[kThreads / kWarpSize];
  const Chunk chunk = table.chunk(blockIdx.x, table.leaf_of(blockIdx.x));
  SumSquares sum;
  switch (chunk.dtype) {
    case DType::kF16: sum = sum_squares<F16>(chunk, dtype); break;
    case DType::kBF16: sum = sum_squares<BF16>(chunk, dtype); break;
    case DType::kF32: sum = sum_squares<float>(chunk, dtype); break;
    default: sum = sum_squares<double>(chunk, dtype); break;
  }
  sum = sum_of_block<kThreads / kWarpSize>(sum, chunk.dtype == DType::kF64, warp_sums);
  if (threadIdx.x == 0) partials[table.chunk_offset + blockIdx.x] = sum;
}

// ---------------------------------------------------------------------------------------------------------------------
// Stage 2

constexpr int kFinalThreads = 512;
constexpr int kFinalWarps = kFinalThreads / kWarpSize;
constexpr uint32_t kThreadChunks = 8;  // a leaf of so many chunks is summed by one thread,
constexpr uint32_t kWarpChunks = 2048;  // and one of so many by one warp

// The chunks `first`, `first + step`, ... of a leaf.
__device__ Total sum_of_chunks(const LeafTable& table, int leaf, const SumSquares* partials, uint32_t first,
                               uint32_t step) {
  const bool wide = table.dtype(leaf) == DType::kF64;
  Total total{};
#pragma unroll 4
  for (uint32_t i = table.first_chunk[leaf] + first; i < table.first_chunk[leaf + 1]; i += step) {
    const SumSquares partial = partials[table.chunk_offset + i];
    if (wide) {
      total.add(partial);
    } else {
      total.mid.add(partial.mid);
      total.nonfinite += partial.nonfinite;
    }
  }
  return total;
}

template <class T, class Operands>
__device__ void put(const Total* leaf_totals, int32_t num_leaves, const Total& all, const Operands& operands) {
  if (threadIdx.x == 0) put_tree<T>(all, operands);
  if (!wants_leaves(operands)) return;
  for (int32_t i = threadIdx.x; i < num_leaves; i += kFinalThreads) put_leaf<T>(i, leaf_totals[i], all, operands);
}

// One block. leaf_totals of the table's leaves, each written by the thread that holds it; with the last leaf of the
// tree also the results, the tree's by thread 0 and each leaf's by one thread.
// Accumulators: float64 with the rounding errors of its additions beside it.
template <class Operands>
__global__ void __launch_bounds__(kFinalThreads)
k_grad_norm_final(const __grid_constant__ LeafTable table, const SumSquares* partials, Total* leaf_totals,
                  int32_t num_leaves, const __grid_constant__ Operands operands) {
  __shared__ Total warp_sums[kFinalWarps];
  __shared__ Total shared_total;
  const int tid = threadIdx.x, lane = tid % kWarpSize, warp = tid / kWarpSize;
  Total* const totals = leaf_totals + table.first_leaf;

  bool too_long = false;
  for (int leaf = tid; leaf < table.num_leaves; leaf += kFinalThreads) {
    const uint32_t chunks = table.first_chunk[leaf + 1] - table.first_chunk[leaf];
    if (chunks <= kThreadChunks) totals[leaf] = sum_of_chunks(table, leaf, partials, 0, 1);
    too_long |= chunks > kWarpChunks;
  }
  for (int leaf = warp; leaf < table.num_leaves; leaf += kFinalWarps) {
    const uint32_t chunks = table.first_chunk[leaf + 1] - table.first_chunk[leaf];
    if (chunks <= kThreadChunks || chunks > kWarpChunks) continue;
    const Total total = sum_of_warp(sum_of_chunks(table, leaf, partials, lane, kWarpSize),
                                    table.dtype(leaf) == DType::kF64);
    if (lane == 0) totals[leaf] = total;
  }
  if (__syncthreads_or(too_long)) {
    for (int leaf = 0; leaf < table.num_leaves; ++leaf) {
      if (table.first_chunk[leaf + 1] - table.first_chunk[leaf] <= kWarpChunks) continue;
      const Total total = sum_of_block<kFinalWarps>(sum_of_chunks(table, leaf, partials, tid, kFinalThreads),
                                                    table.dtype(leaf) == DType::kF64, warp_sums);
      if (tid == 0) totals[leaf] = total;
      __syncthreads();
    }
  }
  if (table.first_leaf + table.num_leaves < num_leaves) return;

  // The totals of earlier tables come from earlier launches, those of this one from before a barrier.
  Total all{};
  for (int32_t i = tid; i < num_leaves; i += kFinalThreads)
    if (counts(operands, i)) all.add(leaf_totals[i]);
  all = sum_of_block<kFinalWarps>(all, operands.dtype == DType::kF64, warp_sums);
  if (tid == 0) shared_total = all;
  __syncthreads();
  if (operands.dtype == DType::kF64) put<double>(leaf_totals, num_leaves, shared_total, operands);
  else put<float>(leaf_totals, num_leaves, shared_total, operands);
}

// ---------------------------------------------------------------------------------------------------------------------
// Stage 3

// `kInFlight` loads of a thread at a time.
template <int kInFlight, class In, class Update>
__device__ __forceinline__ void update_chunk(const Chunk& chunk, const Update& update) {
  const Vectors<In> vectors(chunk);
  const int tid = static_cast<int>(threadIdx.x);
  int base = 0;
#pragma unroll 1
  for (; base + kInFlight * kThreads <= vectors.whole; base += kInFlight * kThreads) {
    Vector<In> v[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) v[j] = load(vectors.at(base + j * kThreads + tid));
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
#pragma unroll
      for (int e = 0; e < Vector<In>::kSize; ++e) v[j].x[e] = update(v[j].x[e]);
      store(vectors.at(base + j * kThreads + tid), v[j]);
    }
  }
#pragma unroll 1
  for (int i = base * Vector<In>::kSize + tid; i < vectors.size; i += kThreads) vectors.x[i] = update(vectors.x[i]);
}

template <class In, class T>
struct Multiply {
  ScaleOp<T> op;
  __device__ In operator()(In x) const { return multiply(x, op); }
};
template <class In, class T>
struct Divide {
  ScaleOp<T> op;
  __device__ In operator()(In x) const { return divide(x, op); }
};
template <class In>
struct Fill {
  In value;
  __device__ In operator()(In) const { return value; }
};

template <class In, class T>
__device__ void scale(const Chunk& chunk, const ScaleOp<T>& op) {
  switch (op.kind()) {
    case Mode::kKeep: return;
    case Mode::kMultiply: return update_chunk<kLoads, In>(chunk, Multiply<In, T>{op});
    // A float64 division takes longer than a load, and a fill waits for none: short code serves.
    case Mode::kDivide: return update_chunk<1, In>(chunk, Divide<In, T>{op});
    case Mode::kFill: return update_chunk<1, In>(chunk, Fill<In>{from_double<In>(op.a)});
  }
}

template <class T>
__device__ void scale_chunks(const LeafTable& table, const ScaleOp<T>* ops, bool per_leaf) {
  if (!per_leaf && ops[0].kind() == Mode::kKeep) return;
  // The last chunks first: they are the ones that stage 1 left in the L2 cache.
  for (int64_t i = static_cast<int64_t>(table.chunks()) - 1 - blockIdx.x; i >= 0; i -= gridDim.x) {
    const Chunk chunk = table.chunk(static_cast<uint32_t>(i), table.leaf_of(static_cast<uint32_t>(i)));
    const ScaleOp<T> op = ops[per_leaf ? table.first_leaf + chunk.leaf : 0];
    switch (chunk.dtype) {
      case DType::kF16: scale<F16>(chunk, op); break;
      case DType::kBF16: scale<BF16>(chunk, op); break;
      case DType::kF32: scale<float>(chunk, op); break;
      case DType::kF64:
        if constexpr (sizeof(T) == sizeof(double)) scale<double>(chunk, op);  // no other tree has such a leaf
        break;
    }
  }
}

// As many blocks as the GPU holds at once, each over chunks gridDim.x apart. Elements in place, each by one thread, in
// T and rounded once; nothing is read or written where the op is to keep.
__global__ void __launch_bounds__(kThreads, 3)
k_grad_scale(const __grid_constant__ LeafTable table, const __grid_constant__ ScaleOperands operands) {
  if (operands.dtype == DType::kF64)
    scale_chunks(table, static_cast<const ScaleOp<double>*>(operands.ops), operands.per_leaf);
  else
    scale_chunks(table, static_cast<const ScaleOp<float>*>(operands.ops), operands.per_leaf);
}

// ---------------------------------------------------------------------------------------------------------------------
// Launchers

template <class... Parameters, class... Arguments>
cudaError_t launch(cudaStream_t stream, void (*kernel)(Parameters...), uint32_t blocks, int threads,
                   const Arguments&... arguments) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
  const cudaError_t pending = cudaGetLastError();
  return error != cudaSuccess ? error : pending;
}

// The number of blocks of k_grad_scale that the current device holds at once.
cudaError_t resident_blocks(int* blocks) {
  int device, processors, blocks_a_processor;
  if (cudaError_t error = cudaGetDevice(&device)) return error;
  if (cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device)) return error;
  if (cudaError_t error =
          cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_a_processor, k_grad_scale, kThreads, 0))
    return error;
  *blocks = processors * blocks_a_processor;
  return cudaSuccess;
}

}  // namespace

cudaError_t launch_grad_norm_partial(cudaStream_t stream, const LeafTable& table, DType dtype, SumSquares* partials) {
  if (table.chunks() == 0) return cudaSuccess;
  return launch(stream, k_grad_norm_partial, table.chunks(), kThreads, table, dtype, partials);
}

cudaError_t launch_grad_norm_final(cudaStream_t stream, const LeafTable& table, const SumSquares* partials,
                                   Total* leaf_totals, int32_t num_leaves, const NormOperands& operands) {
  return launch(stream, k_grad_norm_final<NormOperands>, 1, kFinalThreads, table, partials, leaf_totals, num_leaves,
                operands);
}
cudaError_t launch_grad_norm_final(cudaStream_t stream, const LeafTable& table, const SumSquares* partials,
                                   Total* leaf_totals, int32_t num_leaves, const SumsOperands& operands) {
  return launch(stream, k_grad_norm_final<SumsOperands>, 1, kFinalThreads, table, partials, leaf_totals, num_leaves,
                operands);
}

cudaError_t launch_grad_scale(cudaStream_t stream, const LeafTable& table, const ScaleOperands& operands) {
  if (table.chunks() == 0) return cudaSuccess;
  int blocks;
  if (cudaError_t error = resident_blocks(&blocks)) return error;
  const uint32_t at_once = static_cast<uint32_t>(blocks);
  return launch(stream, k_grad_scale, table.chunks() < at_once ? table.chunks() : at_once, kThreads, table, operands);
}

}  // namespace globalclip
