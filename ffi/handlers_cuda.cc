// XLA FFI handlers for CUDA: bind, validate, launch the three stages on XLA's stream.
//
// A call may be captured into a CUDA graph and replayed: nothing here allocates device memory, waits, or reads what is
// on the device. Sums on their way from one stage to the next live in a result of the call, which XLA keeps in place.
#include <cuda_runtime_api.h>

#include <algorithm>

#include "handlers.h"
#include "kernels_cuda.h"

namespace globalclip {
namespace {

int64_t workspace_bytes(int64_t num_leaves, int64_t num_chunks) {
  return num_chunks * static_cast<int64_t>(sizeof(SumSquares) + sizeof(Extremes)) +
         num_leaves * static_cast<int64_t>(sizeof(Total));
}

// The tables of a call, one at least.
std::vector<LeafTable> make_tables(const std::vector<Leaf>& leaves) {
  std::vector<LeafTable> tables = make_leaf_tables(leaves);
  if (tables.empty()) tables.emplace_back();
  return tables;
}

ffi::Error bind_workspace(const char* target, const ffi::RemainingRets& rets, size_t index,
                          const std::vector<LeafTable>& tables, Workspace* workspace) {
  const LeafTable& last = tables.back();
  const int64_t num_chunks = last.chunk_offset + last.chunks();
  void* data = nullptr;
  FFI_RETURN_IF_ERROR(result(target, "workspace", rets, index, ffi::DataType::U8,
                             workspace_bytes(last.first_leaf + last.num_leaves, num_chunks), &data));
  workspace->partials = static_cast<SumSquares*>(data);
  workspace->extremes = reinterpret_cast<Extremes*>(workspace->partials + num_chunks);
  workspace->leaf_totals = reinterpret_cast<Total*>(workspace->extremes + num_chunks);
  return ffi::Error::Success();
}

ffi::Error launched(const char* target, const char* what, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("optax_globalclip ") + target + ": " + what + ": " +
                              cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}

// Stages 1 and 2.
ffi::Error norm(const char* target, cudaStream_t stream, const std::vector<LeafTable>& tables,
                const Workspace& workspace, const NormOperands& operands) {
  for (const LeafTable& table : tables)
    FFI_RETURN_IF_ERROR(launched(target, "k_grad_norm_partial",
                                 launch_grad_norm_partial(stream, table, workspace, operands)));
  for (const LeafTable& table : tables)
    FFI_RETURN_IF_ERROR(launched(target, "k_grad_norm_final",
                                 launch_grad_norm_final(stream, table, workspace, operands)));
  return ffi::Error::Success();
}

// Stage 3, the last table first.
ffi::Error scale(const char* target, cudaStream_t stream, const std::vector<LeafTable>& tables,
                 const ScaleOperands& operands) {
  for (auto table = tables.rbegin(); table != tables.rend(); ++table)
    FFI_RETURN_IF_ERROR(launched(target, "k_grad_scale", launch_grad_scale(stream, *table, operands)));
  return ffi::Error::Success();
}

ffi::Error copy_if_apart(const char* target, cudaStream_t stream, const AliasedLeaves& aliased) {
  for (size_t i = 0; i < aliased.leaves.size(); ++i) {
    const Leaf& leaf = aliased.leaves[i];
    if (leaf.data == aliased.sources[i] || leaf.size == 0) continue;
    FFI_RETURN_IF_ERROR(launched(target, "copy of a leaf that is not donated",
                                 cudaMemcpyAsync(leaf.data, aliased.sources[i], leaf.size * element_bytes(leaf.dtype),
                                                 cudaMemcpyDeviceToDevice, stream)));
  }
  return ffi::Error::Success();
}

ffi::Error Norm(cudaStream_t stream, ffi::AnyBuffer counted, ffi::AnyBuffer max_norm, ffi::AnyBuffer loss_scale,
                ffi::RemainingArgs args, ffi::RemainingRets rets, NormAttributes attributes) {
  std::vector<Leaf> leaves;
  NormOperands operands;
  Workspace workspace;
  FFI_RETURN_IF_ERROR(
      bind_norm("norm", counted, max_norm, loss_scale, args, rets, attributes, &leaves, &operands));
  const std::vector<LeafTable> tables = make_tables(leaves);
  FFI_RETURN_IF_ERROR(bind_workspace("norm", rets, kNormResults, tables, &workspace));
  return norm("norm", stream, tables, workspace, operands);
}

ffi::Error Scale(cudaStream_t stream, ffi::AnyBuffer ops, ffi::RemainingArgs args, ffi::RemainingRets rets,
                 bool per_leaf) {
  AliasedLeaves aliased;
  ScaleOperands operands;
  FFI_RETURN_IF_ERROR(bind_scale(ops, args, rets, per_leaf, &aliased, &operands));
  FFI_RETURN_IF_ERROR(copy_if_apart("scale", stream, aliased));
  return scale("scale", stream, make_tables(aliased.leaves), operands);
}

ffi::Error Clip(cudaStream_t stream, ffi::AnyBuffer counted, ffi::AnyBuffer max_norm, ffi::AnyBuffer loss_scale,
                ffi::RemainingArgs args, ffi::RemainingRets rets, NormAttributes attributes) {
  AliasedLeaves aliased;
  NormOperands operands;
  Workspace workspace;
  FFI_RETURN_IF_ERROR(bind_clip(counted, max_norm, loss_scale, args, rets, attributes, &aliased, &operands));
  const std::vector<LeafTable> tables = make_tables(aliased.leaves);
  FFI_RETURN_IF_ERROR(bind_workspace("clip", rets, kNormResults + aliased.leaves.size(), tables, &workspace));
  FFI_RETURN_IF_ERROR(copy_if_apart("clip", stream, aliased));
  FFI_RETURN_IF_ERROR(norm("clip", stream, tables, workspace, operands));
  return scale("clip", stream, tables, scale_operands(operands));
}

}  // namespace

GLOBALCLIP_HANDLER(optax_globalclip_norm_cuda_v2, Norm,
                   bind_norm_operands(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                   {ffi::Traits::kCmdBufferCompatible});
GLOBALCLIP_HANDLER(optax_globalclip_clip_cuda_v2, Clip,
                   bind_norm_operands(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                   {ffi::Traits::kCmdBufferCompatible});
GLOBALCLIP_HANDLER(optax_globalclip_scale_cuda_v2, Scale,
                   ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Arg<ffi::AnyBuffer>().RemainingArgs()
                       .RemainingRets().Attr<bool>("per_leaf"),
                   {ffi::Traits::kCmdBufferCompatible});

}  // namespace globalclip

#define GLOBALCLIP_EXPORT extern "C" __attribute__((visibility("default")))

// The XLA FFI version of the headers this was built with, to be compared with the running jaxlib's before registering.
GLOBALCLIP_EXPORT int optax_globalclip_xla_ffi_minor() { return XLA_FFI_API_MINOR; }

// The size of the workspace for leaves of these sizes in bytes.
GLOBALCLIP_EXPORT int64_t optax_globalclip_workspace_bytes(int64_t num_leaves, const int64_t* leaf_bytes) {
  int64_t num_chunks = 0;
  for (int64_t i = 0; i < num_leaves; ++i)
    num_chunks += (leaf_bytes[i] + globalclip::kChunkBytes - 1) / globalclip::kChunkBytes;
  return globalclip::workspace_bytes(num_leaves, num_chunks);
}

// The CUDA version that the driver serves, as 1000 * major + 10 * minor: 0 where there is no driver.
GLOBALCLIP_EXPORT int optax_globalclip_cuda_driver() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

// The oldest such version that will do: the toolkit's major version, and at least 12.1, whose drivers are the first to
// take parameter blocks of more than 4 KiB.
GLOBALCLIP_EXPORT int optax_globalclip_cuda_driver_needed() { return std::max(CUDART_VERSION / 1000 * 1000, 12010); }
