// XLA FFI handlers for the CPU: bind, validate, run the three stages on XLA's own thread pool.
#include <algorithm>

#include "handlers.h"
#include "kernels_cpu.h"
#include "parallel_cpu.h"

namespace globalclip {
namespace {

const CpuKernels& kernels() {
  static const CpuKernels& best = has_avx2() ? kCpuKernelsAvx2 : kCpuKernelsBaseline;
  return best;
}

// A run of neighbouring chunks long enough to be worth a claim.
constexpr uint32_t kChunksAClaim = 8;

enum class Order { kForward, kBackward };

// `work(table, chunk index, chunk, next)` for every chunk of every table; `next` is the data of the one after it.
template <class Work>
void for_each_chunk(ffi::ThreadPool& pool, const std::vector<LeafTable>& tables, Order order, const Work& work) {
  std::vector<int64_t> first_run;  // prefix sums of runs over tables
  int64_t runs = 0, bytes = 0;
  for (const LeafTable& table : tables) {
    first_run.push_back(runs);
    runs += (table.chunks() + kChunksAClaim - 1) / kChunksAClaim;
    for (int leaf = 0; leaf < table.num_leaves; ++leaf) bytes += table.size(leaf) * element_bytes(table.dtype(leaf));
  }
  parallel_for(pool, 1 + bytes / kBytesAThread, runs, [&](int64_t claim) {
    const int64_t run = order == Order::kForward ? claim : runs - 1 - claim;
    const size_t t = std::upper_bound(first_run.begin(), first_run.end(), run) - first_run.begin() - 1;
    const LeafTable& table = tables[t];
    const uint32_t begin = static_cast<uint32_t>(run - first_run[t]) * kChunksAClaim;
    const uint32_t end = std::min(begin + kChunksAClaim, table.chunks());
    int leaf = table.leaf_of(begin);
    Chunk chunk = table.chunk(begin, leaf);
    for (uint32_t i = begin; i < end; ++i) {
      Chunk next = chunk;
      if (i + 1 < end) {
        while (table.first_chunk[leaf + 1] <= i + 1) ++leaf;
        next = table.chunk(i + 1, leaf);
      }
      work(table, i, chunk, next.data);
      chunk = next;
    }
  });
}

// What stage 1 leaves, and stage 2 a leaf.
struct Sums {
  std::vector<Total> of_leaves;
  Extremes extremes;
};

// Stage 1: one partial a chunk. Stage 2 a leaf: the leaf's partials, added in chunk order.
Sums sum_chunks(ffi::ThreadPool& pool, const std::vector<LeafTable>& tables, const NormOperands& operands) {
  const int64_t chunks = tables.empty() ? 0 : tables.back().chunk_offset + tables.back().chunks();
  std::vector<SumSquares> partials(chunks);
  std::vector<Extremes> extremes(operands.extremes ? chunks : 0);
  for_each_chunk(pool, tables, Order::kForward,
                 [&](const LeafTable& table, uint32_t i, const Chunk& chunk, const void* next) {
                   if (operands.counted && operands.counted[table.first_leaf + chunk.leaf] == 0) return;
                   const int64_t at = table.chunk_offset + i;
                   partials[at] = operands.extremes
                                      ? kernels().sum_squares_and_extremes(chunk, next, &extremes[at])
                                      : kernels().sum_squares(chunk, next);
                 });
  Sums sums{std::vector<Total>(operands.num_leaves), {}};
  for (const LeafTable& table : tables)
    for (int leaf = 0; leaf < table.num_leaves; ++leaf) {
      Total& total = sums.of_leaves[table.first_leaf + leaf];
      for (uint32_t i = table.first_chunk[leaf]; i < table.first_chunk[leaf + 1]; ++i)
        total.add(partials[table.chunk_offset + i]);
    }
  for (const Extremes& of_chunk : extremes) sums.extremes.add(of_chunk);
  return sums;
}

// Leaves whose numbers are worth a claim together: each takes a square root and several changes of exponent.
constexpr int64_t kLeavesAClaim = 64;

// The rest of stage 2.
template <class T>
void put(ffi::ThreadPool& pool, const Sums& sums, const NormOperands& operands) {
  Total all{};
  for (const Total& of_leaf : sums.of_leaves) all.add(of_leaf);
  const bool any_nonfinite = all.nonfinite > 0;
  put_numbers<T>(0, all, any_nonfinite, operands);
  if (operands.extremes) put_extremes<T>(sums.extremes, operands);
  if (!operands.leaf_norms) return;
  const int64_t leaves = operands.num_leaves, claims = (leaves + kLeavesAClaim - 1) / kLeavesAClaim;
  parallel_for(pool, claims, claims, [&](int64_t claim) {
    const int64_t end = std::min(leaves, (claim + 1) * kLeavesAClaim);
    for (int64_t i = claim * kLeavesAClaim; i < end; ++i)
      put_numbers<T>(1 + i, sums.of_leaves[i], any_nonfinite, operands);
  });
}

// Stages 1 and 2.
void run_norm(ffi::ThreadPool& pool, const std::vector<Leaf>& leaves, const NormOperands& operands) {
  KeepSubnormals keep;
  const Sums sums = sum_chunks(pool, make_leaf_tables(leaves), operands);
  if (operands.dtype == DType::kF64) put<double>(pool, sums, operands);
  else put<float>(pool, sums, operands);
}

// Stage 3, last chunks first: they are the ones still in the cache.
template <class T>
void scale_chunks(ffi::ThreadPool& pool, const std::vector<LeafTable>& tables, const void* op_data, bool per_leaf) {
  const ScaleOp<T>* ops = static_cast<const ScaleOp<T>*>(op_data);
  if (!per_leaf && ops[0].kind() == Mode::kKeep) return;
  for_each_chunk(pool, tables, Order::kBackward,
                 [&](const LeafTable& table, uint32_t, const Chunk& chunk, const void* next) {
                   const ScaleOp<T>& op = ops[per_leaf ? table.first_leaf + chunk.leaf : 0];
                   if constexpr (sizeof(T) == sizeof(float)) kernels().scale_float(chunk, next, op);
                   else kernels().scale_double(chunk, next, op);
                 });
}

void run_scale(ffi::ThreadPool& pool, const std::vector<Leaf>& leaves, const ScaleOperands& operands) {
  const std::vector<LeafTable> tables = make_leaf_tables(leaves);
  if (operands.dtype == DType::kF64) scale_chunks<double>(pool, tables, operands.ops, operands.per_leaf);
  else scale_chunks<float>(pool, tables, operands.ops, operands.per_leaf);
}

void copy_if_apart(const AliasedLeaves& aliased) {
  for (size_t i = 0; i < aliased.leaves.size(); ++i) {
    const Leaf& leaf = aliased.leaves[i];
    if (leaf.data != aliased.sources[i]) memcpy(leaf.data, aliased.sources[i], leaf.size * element_bytes(leaf.dtype));
  }
}

ffi::Error Norm(ffi::ThreadPool pool, ffi::AnyBuffer counted, ffi::AnyBuffer max_norm, ffi::AnyBuffer loss_scale,
                ffi::RemainingArgs args, ffi::RemainingRets rets, NormAttributes attributes) {
  std::vector<Leaf> leaves;
  NormOperands operands;
  FFI_RETURN_IF_ERROR(
      bind_norm("norm", counted, max_norm, loss_scale, args, rets, attributes, &leaves, &operands));
  run_norm(pool, leaves, operands);
  return ffi::Error::Success();
}

ffi::Error Scale(ffi::ThreadPool pool, ffi::AnyBuffer ops, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 bool per_leaf) {
  AliasedLeaves aliased;
  ScaleOperands operands;
  FFI_RETURN_IF_ERROR(bind_scale(ops, args, rets, per_leaf, &aliased, &operands));
  copy_if_apart(aliased);
  run_scale(pool, aliased.leaves, operands);
  return ffi::Error::Success();
}

ffi::Error Clip(ffi::ThreadPool pool, ffi::AnyBuffer counted, ffi::AnyBuffer max_norm, ffi::AnyBuffer loss_scale,
                ffi::RemainingArgs args, ffi::RemainingRets rets, NormAttributes attributes) {
  AliasedLeaves aliased;
  NormOperands operands;
  FFI_RETURN_IF_ERROR(bind_clip(counted, max_norm, loss_scale, args, rets, attributes, &aliased, &operands));
  copy_if_apart(aliased);
  run_norm(pool, aliased.leaves, operands);
  run_scale(pool, aliased.leaves, scale_operands(operands));
  return ffi::Error::Success();
}

}  // namespace

GLOBALCLIP_HANDLER(optax_globalclip_norm_cpu_v2, Norm,
                   bind_norm_operands(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
GLOBALCLIP_HANDLER(optax_globalclip_clip_cpu_v2, Clip,
                   bind_norm_operands(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));
GLOBALCLIP_HANDLER(optax_globalclip_scale_cpu_v2, Scale,
                   ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().RemainingArgs().RemainingRets()
                       .Attr<bool>("per_leaf"));

}  // namespace globalclip

// The XLA FFI version of the headers this was built with, to be compared with the running jaxlib's before registering.
extern "C" __attribute__((visibility("default"))) int optax_globalclip_xla_ffi_minor() { return XLA_FFI_API_MINOR; }
