// Leaves -> chunks: how a tree of arrays is cut into equal pieces of work, on the host and on the device.
//
// A table goes by value into a kernel's parameter block (32,764 bytes from sm_70 on), so it has a fixed capacity;
// a tree with more leaves takes several tables. Chunks depend on a leaf's size and dtype alone, never on its address,
// the number of threads or the number of multiprocessors: that is what makes every result repeatable bit for bit.
#pragma once

#include <cstdint>
#include <vector>

#ifdef __CUDACC__
#define OGC_HOST_DEVICE __host__ __device__
#else
#define OGC_HOST_DEVICE
#endif

namespace globalclip {

// Element types of the arithmetic. Complex leaves are twice as many real elements.
enum class DType : uint8_t { kF16, kBF16, kF32, kF64 };

static inline OGC_HOST_DEVICE int element_bytes(DType dtype) {
  return dtype == DType::kF64 ? 8 : dtype == DType::kF32 ? 4 : 2;
}

constexpr int64_t kChunkBytes = 64 * 1024;

static inline OGC_HOST_DEVICE int64_t chunk_size(DType dtype) { return kChunkBytes / element_bytes(dtype); }

static inline OGC_HOST_DEVICE int64_t num_chunks(int64_t size, DType dtype) {
  return (size + chunk_size(dtype) - 1) / chunk_size(dtype);
}

// One contiguous run of elements of one leaf.
struct Chunk {
  void* data;
  int64_t size;
  DType dtype;
  int leaf;  // within its table
};

struct LeafTable {
  static constexpr int kCapacity = 1632;

  void* data[kCapacity];
  int64_t size_and_dtype[kCapacity];     // size * 4 + dtype
  uint32_t first_chunk[kCapacity + 1];   // prefix sums within this table; [num_leaves] is the number of chunks
  int32_t num_leaves;
  int32_t first_leaf;                    // index in the whole tree of this table's leaf 0
  int64_t chunk_offset;                  // chunks of the whole tree before this table's

  OGC_HOST_DEVICE int64_t size(int leaf) const { return size_and_dtype[leaf] >> 2; }
  OGC_HOST_DEVICE DType dtype(int leaf) const { return static_cast<DType>(size_and_dtype[leaf] & 3); }
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

  OGC_HOST_DEVICE Chunk chunk(uint32_t index, int leaf) const {
    const DType type = dtype(leaf);
    const int64_t begin = static_cast<int64_t>(index - first_chunk[leaf]) * chunk_size(type);
    const int64_t rest = size(leaf) - begin;
    return {static_cast<char*>(data[leaf]) + begin * element_bytes(type),
            rest < chunk_size(type) ? rest : chunk_size(type), type, leaf};
  }
};
static_assert(sizeof(LeafTable) <= 32764 - 96, "a kernel has other parameters too");

struct Leaf {
  void* data;
  int64_t size;  // in real elements
  DType dtype;
};

// The tables of a whole tree, in leaf order.
static inline std::vector<LeafTable> make_leaf_tables(const std::vector<Leaf>& leaves) {
  std::vector<LeafTable> tables;
  int64_t chunk_offset = 0;
  for (size_t first = 0; first < leaves.size(); first += LeafTable::kCapacity) {
    LeafTable& table = tables.emplace_back();
    table.first_leaf = static_cast<int32_t>(first);
    table.chunk_offset = chunk_offset;
    table.num_leaves = 0;
    table.first_chunk[0] = 0;
    for (size_t i = first; i < leaves.size() && table.num_leaves < LeafTable::kCapacity; ++i) {
      const Leaf& leaf = leaves[i];
      const int n = table.num_leaves++;
      table.data[n] = leaf.data;
      table.size_and_dtype[n] = leaf.size * 4 + static_cast<int64_t>(leaf.dtype);
      table.first_chunk[n + 1] = table.first_chunk[n] + static_cast<uint32_t>(num_chunks(leaf.size, leaf.dtype));
    }
    chunk_offset += table.chunks();
  }
  return tables;
}

}  // namespace globalclip
