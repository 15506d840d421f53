// XLA FFI handler for the CPU of a step of AdamW: bind, validate, run on XLA's own thread pool.
#include "adamw_cpu.h"
#include "adamw_handlers.h"
#include "parallel_cpu.h"

namespace globalclip {
namespace {

const AdamwKernels& adamw_kernels() {
  static const AdamwKernels& best = has_avx2() ? kAdamwKernelsAvx2 : kAdamwKernelsBaseline;
  return best;
}

template <class T>
void run_step(ffi::ThreadPool& pool, const std::vector<StepLeaf>& leaves, const StepNumbers& numbers) {
  const ScaleOp<T>& op = *static_cast<const ScaleOp<T>*>(numbers.op);
  const Coefficients<T>& of = *static_cast<const Coefficients<T>*>(numbers.coefficients);
  if (numbers.skips && op.kind() == Mode::kFill) return;
  std::vector<int64_t> first_chunk{0};  // prefix sums over leaves
  int64_t elements = 0;
  for (const StepLeaf& leaf : leaves) {
    first_chunk.push_back(first_chunk.back() + step_chunks(leaf.size));
    elements += leaf.size;
  }
  const int64_t threads = 1 + elements * 7 * static_cast<int64_t>(sizeof(T)) / kBytesAThread;
  // Neighbouring chunks are one claim: there may be thousands of leaves of a few elements.
  const int64_t chunks = first_chunk.back(), a_claim = chunks > 8 * threads ? 2 : 1;
  parallel_for(pool, threads, (chunks + a_claim - 1) / a_claim, [&](int64_t claim) {
    FlushSubnormals flush;
    size_t i = std::upper_bound(first_chunk.begin(), first_chunk.end(), claim * a_claim) - first_chunk.begin() - 1;
    for (int64_t chunk = claim * a_claim; chunk < std::min(chunks, (claim + 1) * a_claim); ++chunk) {
      while (first_chunk[i + 1] <= chunk) ++i;
      const int64_t begin = (chunk - first_chunk[i]) * kStepChunk, end = std::min(begin + kStepChunk, leaves[i].size);
      if constexpr (sizeof(T) == sizeof(float)) adamw_kernels().step_float(leaves[i], begin, end, op, of);
      else adamw_kernels().step_double(leaves[i], begin, end, op, of);
    }
  });
}

ffi::Error AdamW(ffi::ThreadPool pool, ffi::AnyBuffer op, ffi::AnyBuffer coefficients, ffi::RemainingArgs args,
                 ffi::RemainingRets rets, ffi::Span<const int32_t> decays, bool skips) {
  std::vector<StepLeaf> leaves;
  std::vector<Apart> apart;
  StepNumbers numbers{};
  FFI_RETURN_IF_ERROR(bind_step(op, coefficients, args, rets, decays, skips, &leaves, &apart, &numbers));
  for (const Apart& x : apart) memcpy(x.to, x.from, x.bytes);
  if (numbers.dtype == DType::kF64) run_step<double>(pool, leaves, numbers);
  else run_step<float>(pool, leaves, numbers);
  return ffi::Error::Success();
}

}  // namespace

GLOBALCLIP_HANDLER(optax_globalclip_adamw_cpu_v2, AdamW,
                   bind_step_operands(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()));

}  // namespace globalclip
