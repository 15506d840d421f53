// AdamW on a GPU: k_adamw_step, then its launcher.
#include "adamw_cuda.h"

namespace globalclip {
namespace {

constexpr int kStepThreads = 256;
constexpr int kElements = 4;  // that a thread takes at a time, of each of the four arrays: 16 bytes of float32

// kElements elements of one array of any type, as they lie in memory: four loads of a thread are on their way before the
// first is looked at.
template <class T>
struct Raw {
  uint4 low, high;  // a narrow type fills `low`, or half of it
};

template <class T>
__device__ __forceinline__ Raw<T> load_raw(const void* data, DType dtype, int64_t at) {
  Raw<T> raw{};
  const char* const from = static_cast<const char*>(data) + at * element_bytes(dtype);
  if (dtype == DType::kF32) {
    raw.low = *reinterpret_cast<const uint4*>(from);
  } else if (std::is_same_v<T, double> && dtype == DType::kF64) {
    raw.low = reinterpret_cast<const uint4*>(from)[0];
    raw.high = reinterpret_cast<const uint4*>(from)[1];
  } else {
    const uint2 halves = *reinterpret_cast<const uint2*>(from);
    raw.low.x = halves.x;
    raw.low.y = halves.y;
  }
  return raw;
}

template <class T>
__device__ __forceinline__ void store_raw(void* data, DType dtype, int64_t at, const Raw<T>& raw) {
  char* const to = static_cast<char*>(data) + at * element_bytes(dtype);
  if (dtype == DType::kF32) {
    *reinterpret_cast<uint4*>(to) = raw.low;
  } else if (std::is_same_v<T, double> && dtype == DType::kF64) {
    reinterpret_cast<uint4*>(to)[0] = raw.low;
    reinterpret_cast<uint4*>(to)[1] = raw.high;
  } else {
    *reinterpret_cast<uint2*>(to) = uint2{raw.low.x, raw.low.y};
  }
}

template <class T, class In>
__device__ __forceinline__ T widened(In x) {
  if constexpr (std::is_same_v<T, double>) return to_double(x);
  else return to_float(x);
}
template <class Out, class T>
__device__ __forceinline__ Out narrowed(T x) {
  if constexpr (std::is_same_v<T, double>) return from_double<Out>(x);
  else return from_float<Out>(x);
}

template <class In>
struct Four {
  In x[kElements];
};

// The numbers that `raw` holds, and back.
template <class T>
__device__ __forceinline__ void decode(const Raw<T>& raw, DType dtype, T (&x)[kElements]) {
  const auto each = [&](auto four) {
    for (int i = 0; i < kElements; ++i) x[i] = widened<T>(four.x[i]);
  };
  const uint2 halves = uint2{raw.low.x, raw.low.y};
  if (dtype == DType::kF32) each(bit_cast<Four<float>>(raw.low));
  else if (dtype == DType::kBF16) each(bit_cast<Four<BF16>>(halves));
  else if (dtype == DType::kF16) each(bit_cast<Four<F16>>(halves));
  else if constexpr (std::is_same_v<T, double>) each(bit_cast<Four<double>>(raw));
}

template <class Out, class T>
__device__ __forceinline__ Four<Out> narrowed_four(const T (&x)[kElements]) {
  Four<Out> four;
  for (int i = 0; i < kElements; ++i) four.x[i] = narrowed<Out>(x[i]);
  return four;
}

template <class T>
__device__ __forceinline__ Raw<T> encode(DType dtype, const T (&x)[kElements]) {
  Raw<T> raw{};
  if (dtype == DType::kF32) {
    raw.low = bit_cast<uint4>(narrowed_four<float>(x));
  } else if (std::is_same_v<T, double> && dtype == DType::kF64) {
    if constexpr (std::is_same_v<T, double>) raw = bit_cast<Raw<T>>(narrowed_four<double>(x));
  } else {
    const uint2 halves = dtype == DType::kBF16 ? bit_cast<uint2>(narrowed_four<BF16>(x))
                                               : bit_cast<uint2>(narrowed_four<F16>(x));
    raw.low.x = halves.x;
    raw.low.y = halves.y;
  }
  return raw;
}

// One element, for what does not fill kElements or does not lie at their address.
template <class T>
__device__ T get(const void* data, DType dtype, int64_t at) {
  return with_step_type<T>(dtype, [&](auto tag) { return widened<T>(static_cast<const decltype(tag)*>(data)[at]); });
}
template <class T>
__device__ void put(void* data, DType dtype, int64_t at, T x) {
  with_step_type<T>(dtype, [&](auto tag) { static_cast<decltype(tag)*>(data)[at] = narrowed<decltype(tag)>(x); });
}

__device__ __forceinline__ bool lies_at_vectors(const void* data, DType dtype) {
  return reinterpret_cast<uintptr_t>(data) % (dtype == DType::kF64 ? 16 : kElements * element_bytes(dtype)) == 0;
}

template <class T>
__device__ __forceinline__ T changed(T g, const ScaleOp<T>& op) {
  with_gradient_change(op.kind(), [&](auto change) { g = change(g, op); });
  return g;
}

template <class T>
__device__ void step_chunk(const StepLeaf& leaf, int64_t begin, int64_t end, const ScaleOp<T>& op,
                           const Coefficients<T>& of) {
  int64_t scalars = begin;  // those from here on are taken one by one
  if (lies_at_vectors(leaf.g, leaf.g_type) && lies_at_vectors(leaf.m, leaf.m_type) &&
      lies_at_vectors(leaf.v, leaf.v_type) && lies_at_vectors(leaf.p, leaf.p_type)) {
    scalars = begin + (end - begin) / kElements * kElements;
#pragma unroll 1
    for (int64_t at = begin + threadIdx.x * kElements; at < scalars; at += kStepThreads * kElements) {
      const Raw<T> raw_g = load_raw<T>(leaf.g, leaf.g_type, at), raw_m = load_raw<T>(leaf.m, leaf.m_type, at),
                   raw_v = load_raw<T>(leaf.v, leaf.v_type, at), raw_p = load_raw<T>(leaf.p, leaf.p_type, at);
      T g[kElements], m[kElements], v[kElements], p[kElements];
      decode(raw_g, leaf.g_type, g);
      decode(raw_m, leaf.m_type, m);
      decode(raw_v, leaf.v_type, v);
      decode(raw_p, leaf.p_type, p);
#pragma unroll
      for (int i = 0; i < kElements; ++i) adamw(changed(g[i], op), of, leaf.decays, m[i], v[i], p[i]);
      store_raw(leaf.m, leaf.m_type, at, encode(leaf.m_type, m));
      store_raw(leaf.v, leaf.v_type, at, encode(leaf.v_type, v));
      store_raw(leaf.p, leaf.p_type, at, encode(leaf.p_type, p));
    }
  }
#pragma unroll 1
  for (int64_t at = scalars + threadIdx.x; at < end; at += kStepThreads) {
    T m = get<T>(leaf.m, leaf.m_type, at), v = get<T>(leaf.v, leaf.v_type, at), p = get<T>(leaf.p, leaf.p_type, at);
    adamw(changed(get<T>(leaf.g, leaf.g_type, at), op), of, leaf.decays, m, v, p);
    put(leaf.m, leaf.m_type, at, m);
    put(leaf.v, leaf.v_type, at, v);
    put(leaf.p, leaf.p_type, at, p);
  }
}

// One block a chunk. Every element is read and written by one thread, in place; no order matters.
// Nothing is read or written where a bad update is to be skipped.
template <class T>
__global__ void __launch_bounds__(kStepThreads)
k_adamw_step(const __grid_constant__ StepTable table, const __grid_constant__ StepNumbers numbers) {
  const ScaleOp<T> op = *static_cast<const ScaleOp<T>*>(numbers.op);
  if (numbers.skips && op.kind() == Mode::kFill) return;
  const Coefficients<T> of = *static_cast<const Coefficients<T>*>(numbers.coefficients);
  const int i = table.leaf_of(blockIdx.x);
  const StepLeaf leaf = table.leaf(i);
  const int64_t begin = static_cast<int64_t>(blockIdx.x - table.first_chunk[i]) * kStepChunk;
  const int64_t end = begin + kStepChunk < leaf.size ? begin + kStepChunk : leaf.size;
  step_chunk(leaf, begin, end, op, of);
}

}  // namespace

cudaError_t launch_adamw_step(cudaStream_t stream, const StepTable& table, const StepNumbers& numbers) {
  if (table.chunks() == 0) return cudaSuccess;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(table.chunks());
  config.blockDim = dim3(kStepThreads);
  config.stream = stream;
  const cudaError_t error = cudaLaunchKernelEx(
      &config, numbers.dtype == DType::kF64 ? k_adamw_step<double> : k_adamw_step<float>, table, numbers);
  const cudaError_t pending = cudaGetLastError();
  return error != cudaSuccess ? error : pending;
}

}  // namespace globalclip
