// From XLA's buffers to the leaves of a step: the validation that both platforms' handlers share.
//
//   adamw  (op T[1,3], coefficients T[10], g of n leaves, m, v, p) -> (m, v, p)
//
// The results are usually the same memory as their operands. T is float64 where any leaf is, else float32. Real leaves.
// Attributes: decays s32[n], whether the leaf decays; skips, whether a bad update (Mode::kFill) leaves all as it is.
#pragma once

#include "adamw_math.h"
#include "handlers.h"

namespace globalclip {

// A result that is not the same memory as its operand.
struct Apart {
  void* to;
  const void* from;
  int64_t bytes;
};

static inline ffi::Error bind_real(const ffi::AnyBuffer& buffer, const std::string& name, int64_t size, DType* dtype) {
  Leaf leaf{};
  FFI_RETURN_IF_ERROR(to_leaf("adamw", 0, buffer, &leaf));
  const ffi::DataType type = buffer.element_type();
  if (leaf.size != size || type == ffi::DataType::C64 || type == ffi::DataType::C128)
    return invalid("adamw", name, "a real leaf of " + std::to_string(size) + " elements", describe(buffer));
  *dtype = leaf.dtype;
  return ffi::Error::Success();
}

static inline ffi::Error bind_step(const ffi::AnyBuffer& op, const ffi::AnyBuffer& coefficients,
                                   const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                   ffi::Span<const int32_t> decays, bool skips, std::vector<StepLeaf>* leaves,
                                   std::vector<Apart>* apart, StepNumbers* numbers) {
  const size_t n = decays.size();
  if (args.size() != 4 * n || rets.size() != 3 * n)
    return invalid("adamw", "operands and results", std::to_string(4 * n) + " and " + std::to_string(3 * n),
                   std::to_string(args.size()) + " and " + std::to_string(rets.size()));
  leaves->resize(n);
  numbers->dtype = op.element_type() == ffi::DataType::F64 ? DType::kF64 : DType::kF32;
  numbers->op = op.untyped_data();
  numbers->coefficients = coefficients.untyped_data();
  numbers->skips = skips;
  FFI_RETURN_IF_ERROR(check("adamw", "op", op, ffi_type(numbers->dtype), 3));
  FFI_RETURN_IF_ERROR(check("adamw", "coefficients", coefficients, ffi_type(numbers->dtype), kCoefficients));
  for (size_t i = 0; i < n; ++i) {
    StepLeaf& leaf = (*leaves)[i];
    const ffi::AnyBuffer g = *args.get<ffi::AnyBuffer>(i);
    leaf.g = g.untyped_data();
    leaf.size = static_cast<int64_t>(g.element_count());
    leaf.decays = decays.begin()[i] != 0;
    FFI_RETURN_IF_ERROR(bind_real(g, "g of leaf " + std::to_string(i), leaf.size, &leaf.g_type));
    void** const places[] = {&leaf.m, &leaf.v, &leaf.p};
    DType* const types[] = {&leaf.m_type, &leaf.v_type, &leaf.p_type};
    for (size_t j = 0; j < 3; ++j) {
      const char* const name = j == 0 ? "m of leaf " : j == 1 ? "v of leaf " : "p of leaf ";
      const ffi::AnyBuffer operand = *args.get<ffi::AnyBuffer>((j + 1) * n + i);
      FFI_RETURN_IF_ERROR(bind_real(operand, name + std::to_string(i), leaf.size, types[j]));
      FFI_RETURN_IF_ERROR(result("adamw", name, rets, j * n + i, operand.element_type(), leaf.size, places[j]));
      if (*places[j] != operand.untyped_data())
        apart->push_back({*places[j], operand.untyped_data(), leaf.size * element_bytes(*types[j])});
    }
    if (numbers->dtype == DType::kF32)
      for (DType type : {leaf.g_type, leaf.m_type, leaf.v_type, leaf.p_type})
        if (type == DType::kF64) return invalid("adamw", "op", "float64 beside a float64 leaf", describe(op));
  }
  return ffi::Error::Success();
}

// What follows the context in the binding.
template <class Binding>
auto bind_step_operands(Binding context) {
  return std::move(context)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets()
      .template Attr<ffi::Span<const int32_t>>("decays")
      .template Attr<bool>("skips");
}

}  // namespace globalclip
