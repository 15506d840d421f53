// A step of AdamW on a GPU, in plain CUDA types: one launch on `stream` and nothing else, so that it may be captured
// into a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include "adamw_math.h"

namespace globalclip {

// The leaves of one launch. It goes by value into the kernel's parameter block.
struct StepTable {
  static constexpr int kCapacity = 640;

  const void* g[kCapacity];
  void* m[kCapacity];
  void* v[kCapacity];
  void* p[kCapacity];
  int64_t size_and_kind[kCapacity];     // size * 512 + whether it decays, then two bits for each of p, v, m and g
  uint32_t first_chunk[kCapacity + 1];  // prefix sums; [num_leaves] is the number of chunks
  int32_t num_leaves;

  void add(const StepLeaf& leaf) {
    const int n = num_leaves++;
    g[n] = leaf.g;
    m[n] = leaf.m;
    v[n] = leaf.v;
    p[n] = leaf.p;
    int64_t kind = leaf.decays;
    for (DType type : {leaf.p_type, leaf.v_type, leaf.m_type, leaf.g_type}) kind = kind * 4 + static_cast<int>(type);
    size_and_kind[n] = leaf.size * 512 + kind;
    first_chunk[n + 1] = first_chunk[n] + static_cast<uint32_t>(step_chunks(leaf.size));
  }

  OGC_HOST_DEVICE uint32_t chunks() const { return first_chunk[num_leaves]; }

  // The leaf that holds `chunk`: the last one whose first_chunk is not above it (empty leaves hold none).
  OGC_HOST_DEVICE int leaf_of(uint32_t chunk) const {
    int low = 0, high = num_leaves;
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_chunk[middle] <= chunk) low = middle; else high = middle;
    }
    return low;
  }

  OGC_HOST_DEVICE StepLeaf leaf(int i) const {
    const int64_t kind = size_and_kind[i] % 512;
    const auto type = [&](int which) { return static_cast<DType>(kind >> 2 * which & 3); };
    return {g[i], m[i], v[i], p[i], size_and_kind[i] / 512, type(0), type(1), type(2), type(3), (kind & 256) != 0};
  }
};
static_assert(sizeof(StepTable) <= 32764 - 96, "a kernel has other parameters too");

// The leaves of `table` after a step, in place.
cudaError_t launch_adamw_step(cudaStream_t stream, const StepTable& table, const StepNumbers& numbers);

}  // namespace globalclip
