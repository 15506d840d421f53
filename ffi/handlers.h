// From XLA's buffers to the stages' operands: the validation that both platforms' handlers share.
//
// Operand and result order of the targets:
//   sums   (counted s32[n], leaf 0 .. n-1)            -> (sums T[k,3], nonfinite s32[k])
//   norm   (max_norm T[], loss_scale f32[], leaves)   -> (norms T[n+1], nonfinite s32[n], ops T[k,3])
//   scale  (ops T[k,3], leaves)                       -> (leaves)
//   clip   (max_norm T[], loss_scale f32[], leaves)   -> (norms T[n+1], nonfinite s32[n], ops T[k,3], leaves)
// k is n with the attribute `per_leaf`, else 1. Without the attribute `leaf_norms` norms is T[1] and nonfinite s32[1],
// the whole tree's; `per_leaf` needs it. T is float64 where a leaf is float64 or complex128, else float32.
// On CUDA sums, norm and clip have one more result, the last: workspace u8[optax_globalclip_workspace_bytes].
#pragma once

#include <string>
#include <vector>

#include "clip_math.h"
#include "xla/ffi/api/ffi.h"

// After the binding may come a list of ffi::Traits.
#define GLOBALCLIP_HANDLER(name, function, ...)                                              \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame*); \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name, function, __VA_ARGS__)

#define FFI_RETURN_IF_ERROR(expression) \
  if (ffi::Error error = (expression); error.failure()) return error

namespace globalclip {

namespace ffi = xla::ffi;

// Results to be scaled in place, and the operands they are usually the same memory as.
struct AliasedLeaves {
  std::vector<Leaf> leaves;
  std::vector<const void*> sources;
};

static inline std::string describe(const ffi::AnyBuffer& buffer) {
  std::string text = "dtype " + std::to_string(static_cast<int>(buffer.element_type())) + " shape [";
  for (int64_t d : buffer.dimensions()) text += std::to_string(d) + ",";
  if (text.back() == ',') text.pop_back();
  return text + "]";
}

static inline ffi::Error invalid(const char* target, const std::string& operand, const std::string& expected,
                                 const std::string& got) {
  return ffi::Error::InvalidArgument(std::string("optax_globalclip ") + target + ": " + operand + ": expected " +
                                     expected + ", got " + got);
}

static inline ffi::Error to_leaf(const char* target, size_t index, const ffi::AnyBuffer& buffer, Leaf* leaf) {
  leaf->data = buffer.untyped_data();
  leaf->size = static_cast<int64_t>(buffer.element_count());
  switch (buffer.element_type()) {
    case ffi::DataType::F16: leaf->dtype = DType::kF16; return ffi::Error::Success();
    case ffi::DataType::BF16: leaf->dtype = DType::kBF16; return ffi::Error::Success();
    case ffi::DataType::F32: leaf->dtype = DType::kF32; return ffi::Error::Success();
    case ffi::DataType::F64: leaf->dtype = DType::kF64; return ffi::Error::Success();
    case ffi::DataType::C64: leaf->dtype = DType::kF32; leaf->size *= 2; return ffi::Error::Success();
    case ffi::DataType::C128: leaf->dtype = DType::kF64; leaf->size *= 2; return ffi::Error::Success();
    default:
      return invalid(target, "leaf " + std::to_string(index), "float16, bfloat16, float32, float64, complex64 or complex128",
                     describe(buffer));
  }
}

static inline ffi::Error to_leaves(const char* target, const ffi::RemainingArgs& args, std::vector<Leaf>* leaves) {
  leaves->resize(args.size());
  for (size_t i = 0; i < args.size(); ++i) {
    auto buffer = args.get<ffi::AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    FFI_RETURN_IF_ERROR(to_leaf(target, i, *buffer, &(*leaves)[i]));
  }
  return ffi::Error::Success();
}

static inline DType norm_dtype(const std::vector<Leaf>& leaves) {
  for (const Leaf& leaf : leaves)
    if (leaf.dtype == DType::kF64) return DType::kF64;
  return DType::kF32;
}

static inline ffi::DataType ffi_type(DType dtype) {
  return dtype == DType::kF64 ? ffi::DataType::F64 : ffi::DataType::F32;
}

static inline ffi::Error check(const char* target, const char* operand, const ffi::AnyBuffer& buffer,
                               ffi::DataType dtype, int64_t count) {
  if (buffer.element_type() == dtype && static_cast<int64_t>(buffer.element_count()) == count)
    return ffi::Error::Success();
  return invalid(target, operand,
                 "dtype " + std::to_string(static_cast<int>(dtype)) + " with " + std::to_string(count) + " elements",
                 describe(buffer));
}

static inline ffi::Error result(const char* target, const char* name, const ffi::RemainingRets& rets, size_t index,
                                ffi::DataType dtype, int64_t count, void** data) {
  auto buffer = rets.get<ffi::AnyBuffer>(index);
  if (buffer.has_error()) return buffer.error();
  *data = (*buffer)->untyped_data();
  return check(target, name, **buffer, dtype, count);
}

static inline ffi::Error bind_sums(const ffi::AnyBuffer& counted, const ffi::RemainingArgs& args,
                                   const ffi::RemainingRets& rets, bool per_leaf, std::vector<Leaf>* leaves,
                                   SumsOperands* operands) {
  FFI_RETURN_IF_ERROR(to_leaves("sums", args, leaves));
  const int64_t n = static_cast<int64_t>(leaves->size()), k = per_leaf ? n : 1;
  operands->dtype = norm_dtype(*leaves);
  operands->counted = static_cast<const int32_t*>(counted.untyped_data());
  operands->per_leaf = per_leaf;
  void* nonfinite = nullptr;
  FFI_RETURN_IF_ERROR(check("sums", "counted", counted, ffi::DataType::S32, n));
  FFI_RETURN_IF_ERROR(result("sums", "sums", rets, 0, ffi_type(operands->dtype), 3 * k, &operands->sums));
  FFI_RETURN_IF_ERROR(result("sums", "nonfinite", rets, 1, ffi::DataType::S32, k, &nonfinite));
  operands->nonfinite = static_cast<int32_t*>(nonfinite);
  return ffi::Error::Success();
}

static inline ffi::Error bind_norm(const char* target, const ffi::AnyBuffer& max_norm,
                                   const ffi::AnyBuffer& loss_scale, const ffi::RemainingArgs& args,
                                   const ffi::RemainingRets& rets, bool per_leaf, bool leaf_norms,
                                   int32_t on_nonfinite, std::vector<Leaf>* leaves, NormOperands* operands) {
  if (per_leaf && !leaf_norms) return invalid(target, "attribute leaf_norms", "true beside per_leaf", "false");
  FFI_RETURN_IF_ERROR(to_leaves(target, args, leaves));
  const int64_t n = static_cast<int64_t>(leaves->size()), k = per_leaf ? n : 1;
  operands->dtype = norm_dtype(*leaves);
  operands->max_norm = max_norm.untyped_data();
  operands->loss_scale = static_cast<const float*>(loss_scale.untyped_data());
  operands->per_leaf = per_leaf;
  operands->leaf_norms = leaf_norms;
  operands->on_nonfinite = static_cast<OnNonfinite>(on_nonfinite);
  const ffi::DataType type = ffi_type(operands->dtype);
  void* nonfinite = nullptr;
  FFI_RETURN_IF_ERROR(check(target, "max_norm", max_norm, type, 1));
  FFI_RETURN_IF_ERROR(check(target, "loss_scale", loss_scale, ffi::DataType::F32, 1));
  FFI_RETURN_IF_ERROR(result(target, "norms", rets, 0, type, leaf_norms ? n + 1 : 1, &operands->norms));
  FFI_RETURN_IF_ERROR(result(target, "nonfinite", rets, 1, ffi::DataType::S32, leaf_norms ? n : 1, &nonfinite));
  FFI_RETURN_IF_ERROR(result(target, "ops", rets, 2, type, 3 * k, &operands->ops));
  operands->nonfinite = static_cast<int32_t*>(nonfinite);
  return ffi::Error::Success();
}

// Points the leaves at the results from `first` on, each of which must be like its operand.
static inline ffi::Error bind_aliased(const char* target, const ffi::RemainingArgs& args,
                                      const ffi::RemainingRets& rets, size_t first, AliasedLeaves* aliased) {
  for (size_t i = 0; i < aliased->leaves.size(); ++i) {
    const ffi::AnyBuffer operand = *args.get<ffi::AnyBuffer>(i);
    void* data = nullptr;
    const auto bind = [&](const char* name) {
      return result(target, name, rets, first + i, operand.element_type(),
                    static_cast<int64_t>(operand.element_count()), &data);
    };
    // The name is made where it is needed alone: there may be thousands of leaves.
    if (bind("").failure()) return bind(("result of leaf " + std::to_string(i)).c_str());
    aliased->sources.push_back(aliased->leaves[i].data);
    aliased->leaves[i].data = data;
  }
  return ffi::Error::Success();
}

static inline ffi::Error bind_scale(const ffi::AnyBuffer& ops, const ffi::RemainingArgs& args,
                                    const ffi::RemainingRets& rets, bool per_leaf, AliasedLeaves* aliased,
                                    ScaleOperands* operands) {
  FFI_RETURN_IF_ERROR(to_leaves("scale", args, &aliased->leaves));
  // The op's dtype is the whole tree's, and these leaves may be a batch of it.
  operands->dtype = ops.element_type() == ffi::DataType::F64 ? DType::kF64 : DType::kF32;
  operands->ops = ops.untyped_data();
  operands->per_leaf = per_leaf;
  const int64_t k = per_leaf ? static_cast<int64_t>(aliased->leaves.size()) : 1;
  FFI_RETURN_IF_ERROR(check("scale", "ops", ops, ffi_type(operands->dtype), 3 * k));
  if (operands->dtype == DType::kF32 && norm_dtype(aliased->leaves) == DType::kF64)
    return invalid("scale", "ops", "float64 beside a float64 leaf", describe(ops));
  return bind_aliased("scale", args, rets, 0, aliased);
}

static inline ffi::Error bind_clip(const ffi::AnyBuffer& max_norm, const ffi::AnyBuffer& loss_scale,
                                   const ffi::RemainingArgs& args, const ffi::RemainingRets& rets, bool per_leaf,
                                   bool leaf_norms, int32_t on_nonfinite, AliasedLeaves* aliased,
                                   NormOperands* operands) {
  FFI_RETURN_IF_ERROR(bind_norm("clip", max_norm, loss_scale, args, rets, per_leaf, leaf_norms, on_nonfinite,
                                &aliased->leaves, operands));
  return bind_aliased("clip", args, rets, 3, aliased);
}

}  // namespace globalclip
