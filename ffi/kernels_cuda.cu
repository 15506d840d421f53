// Clipping on a GPU: k_grad_norm_partial, k_grad_norm_final, k_grad_scale, then their launchers.
//
// Every kernel takes all leaves of a table in one launch. Which thread adds which element, and in what order, follows
// from the leaves' sizes and dtypes alone: no atomics, nothing that depends on addresses, on the number of
// multiprocessors or on the order in which blocks run. Results are the same bit for bit from run to run, from GPU to
// GPU, and at every alignment.
#include "kernels_cuda.h"

#include <type_traits>

#include "sums_cuda.h"

namespace globalclip {
namespace {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

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

__device__ Extremes sum_of_warp(Extremes extremes, bool) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    extremes.add({from_lane_below(extremes.largest, offset),
                  __shfl_down_sync(kAllLanes, static_cast<long long>(extremes.zeros), offset)});
  return extremes;
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
// Stage 1. One block a chunk: partials[table.chunk_offset + blockIdx.x], and with ThreadExtremes what lies beside it in
// `extremes`, written by thread 0. A leaf that does not count is as good as empty: it is not read.
// Accumulators: pairs of float32 a thread, or float64 where the norm's `dtype` is; float64 a warp and the block.
template <class OfThread>
__global__ void __launch_bounds__(kThreads)
k_grad_norm_partial(const __grid_constant__ LeafTable table, DType dtype, const int32_t* counted,
                    const __grid_constant__ Workspace workspace) {
  __shared__ SumSquares warp_sums[kThreads / kWarpSize];
  const int64_t at = table.chunk_offset + blockIdx.x;
  Chunk chunk = table.chunk(blockIdx.x, table.leaf_of(blockIdx.x));
  if (counted != nullptr && counted[table.first_leaf + chunk.leaf] == 0) chunk.size = 0;
  SumSquares sum;
  OfThread extremes;
  switch (chunk.dtype) {
    case DType::kF16: sum = sum_squares<F16>(chunk, dtype, &extremes); break;
    case DType::kBF16: sum = sum_squares<BF16>(chunk, dtype, &extremes); break;
    case DType::kF32: sum = sum_squares<float>(chunk, dtype, &extremes); break;
    default: sum = sum_squares<double>(chunk, dtype, &extremes); break;
  }
  sum = sum_of_block<kThreads / kWarpSize>(sum, chunk.dtype == DType::kF64, warp_sums);
  if (threadIdx.x == 0) workspace.partials[at] = sum;
  if constexpr (std::is_same_v<OfThread, ThreadExtremes>) {
    __shared__ Extremes warp_extremes[kThreads / kWarpSize];
    Extremes all = {fmax(static_cast<double>(extremes.largest), extremes.largest_float64), -extremes.nonzeros};
    all = sum_of_block<kThreads / kWarpSize>(all, false, warp_extremes);
    all.zeros += chunk.size;
    if (threadIdx.x == 0) workspace.extremes[at] = all;
  }
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

// What stage 1 saw of all `chunks`. Thread 0 holds it.
__device__ Extremes extremes_of_chunks(const Extremes* of_chunks, int64_t chunks) {
  __shared__ Extremes warp_extremes[kFinalWarps];
  Extremes extremes{};
  for (int64_t i = threadIdx.x; i < chunks; i += kFinalThreads) extremes.add(of_chunks[i]);
  return sum_of_block<kFinalWarps>(extremes, false, warp_extremes);
}

template <class T>
__device__ void put(const Workspace& workspace, int64_t chunks, const Total& all, const NormOperands& operands) {
  const bool any_nonfinite = all.nonfinite > 0;
  if (threadIdx.x == 0) put_numbers<T>(0, all, any_nonfinite, operands);
  if (operands.leaf_norms)
    for (int32_t i = threadIdx.x; i < operands.num_leaves; i += kFinalThreads)
      put_numbers<T>(1 + i, workspace.leaf_totals[i], any_nonfinite, operands);
  if (operands.extremes != nullptr) {
    const Extremes extremes = extremes_of_chunks(workspace.extremes, chunks);
    if (threadIdx.x == 0) put_extremes<T>(extremes, operands);
  }
}

// One block. leaf_totals of the table's leaves, each written by the thread that holds it; with the last leaf of the
// tree also the results, the tree's by thread 0 and each leaf's by one thread.
// Accumulators: float64 with the rounding errors of its additions beside it.
__global__ void __launch_bounds__(kFinalThreads)
k_grad_norm_final(const __grid_constant__ LeafTable table, const __grid_constant__ Workspace workspace,
                  const __grid_constant__ NormOperands operands) {
  __shared__ Total warp_sums[kFinalWarps];
  __shared__ Total shared_total;
  const int tid = threadIdx.x, lane = tid % kWarpSize, warp = tid / kWarpSize;
  const SumSquares* const partials = workspace.partials;
  Total* const totals = workspace.leaf_totals + table.first_leaf;

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
  if (table.first_leaf + table.num_leaves < operands.num_leaves) return;

  // The totals of earlier tables come from earlier launches, those of this one from before a barrier.
  Total all{};
  for (int32_t i = tid; i < operands.num_leaves; i += kFinalThreads) all.add(workspace.leaf_totals[i]);
  all = sum_of_block<kFinalWarps>(all, operands.dtype == DType::kF64, warp_sums);
  if (tid == 0) shared_total = all;
  __syncthreads();
  const int64_t chunks = table.chunk_offset + table.chunks();
  if (operands.dtype == DType::kF64) put<double>(workspace, chunks, shared_total, operands);
  else put<float>(workspace, chunks, shared_total, operands);
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
  const Mode mode = op.kind();
  if (mode == Mode::kKeep) return;
  // A float64 division takes longer than a load, and a fill waits for none: short code serves.
  if (mode == Mode::kDivide) return update_chunk<1, In>(chunk, Divide<In, T>{op});
  if (mode == Mode::kFill) return update_chunk<1, In>(chunk, Fill<In>{from_double<In>(op.a)});
  update_chunk<kLoads, In>(chunk, Multiply<In, T>{op});  // to unscale, or to clip
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

cudaError_t launch_grad_norm_partial(cudaStream_t stream, const LeafTable& table, const Workspace& workspace,
                                     const NormOperands& operands) {
  if (table.chunks() == 0) return cudaSuccess;
  const auto kernel =
      operands.extremes != nullptr ? k_grad_norm_partial<ThreadExtremes> : k_grad_norm_partial<NoExtremes>;
  return launch(stream, kernel, table.chunks(), kThreads, table, operands.dtype, operands.counted, workspace);
}

cudaError_t launch_grad_norm_final(cudaStream_t stream, const LeafTable& table, const Workspace& workspace,
                                   const NormOperands& operands) {
  return launch(stream, k_grad_norm_final, 1, kFinalThreads, table, workspace, operands);
}

cudaError_t launch_grad_scale(cudaStream_t stream, const LeafTable& table, const ScaleOperands& operands) {
  if (table.chunks() == 0) return cudaSuccess;
  int blocks;
  if (cudaError_t error = resident_blocks(&blocks)) return error;
  const uint32_t at_once = static_cast<uint32_t>(blocks);
  return launch(stream, k_grad_scale, table.chunks() < at_once ? table.chunks() : at_once, kThreads, table, operands);
}

}  // namespace globalclip
