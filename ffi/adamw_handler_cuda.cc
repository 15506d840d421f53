// XLA FFI handler for CUDA of a step of AdamW: bind, validate, launch on XLA's stream. As in handlers_cuda.cc nothing
// here allocates device memory, waits, or reads what is on the device.
#include <cuda_runtime_api.h>

#include "adamw_cuda.h"
#include "adamw_handlers.h"

namespace globalclip {
namespace {

ffi::Error succeeded(const char* what, cudaError_t error) {
  if (error == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string("optax_globalclip adamw: ") + what + ": " + cudaGetErrorName(error) + ": " +
                              cudaGetErrorString(error));
}

ffi::Error AdamW(cudaStream_t stream, ffi::AnyBuffer op, ffi::AnyBuffer coefficients, ffi::RemainingArgs args,
                 ffi::RemainingRets rets, ffi::Span<const int32_t> decays, bool skips) {
  std::vector<StepLeaf> leaves;
  std::vector<Apart> apart;
  StepNumbers numbers{};
  FFI_RETURN_IF_ERROR(bind_step(op, coefficients, args, rets, decays, skips, &leaves, &apart, &numbers));
  for (const Apart& x : apart)
    if (x.bytes > 0)
      FFI_RETURN_IF_ERROR(succeeded("copy of a leaf that is not donated",
                                    cudaMemcpyAsync(x.to, x.from, x.bytes, cudaMemcpyDeviceToDevice, stream)));
  for (size_t first = 0; first < leaves.size(); first += StepTable::kCapacity) {
    StepTable table;
    table.num_leaves = 0;
    table.first_chunk[0] = 0;
    for (size_t i = first; i < leaves.size() && table.num_leaves < StepTable::kCapacity; ++i) table.add(leaves[i]);
    FFI_RETURN_IF_ERROR(succeeded("k_adamw_step", launch_adamw_step(stream, table, numbers)));
  }
  return ffi::Error::Success();
}

}  // namespace

GLOBALCLIP_HANDLER(optax_globalclip_adamw_cuda_v2, AdamW,
                   bind_step_operands(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>()),
                   {ffi::Traits::kCmdBufferCompatible});

}  // namespace globalclip
