// From XLA's buffers to the stages' operands: the validation that both platforms' handlers share.
//
// Operands and results of the targets, in order, for n leaves:
//   norm   (counted s32[n], max_norm T[], loss_scale f32[], leaves)
//          -> (rows T[m,3], nonfinite s32[m], norms T[m], ops T[k,3], extremes T[e])
//   clip   as norm, and then the leaves as results
//   scale  (ops T[k,3], leaves) -> (leaves)
// On CUDA norm and clip have one more result, the last: workspace u8[optax_globalclip_workspace_bytes].
//
// T is float64 where a leaf is float64 or complex128, else float32. A complex element is two real ones everywhere.
// counted    0 for a leaf that another device counts: it is as good as empty, and not read. s32[0]: all leaves count.
// m          n + 1 with the attribute `leaf_norms`, else 1. Number 0 is the whole tree's, number 1 + i leaf i's.
// k          n + 1 with the attribute `per_leaf`, which needs `leaf_norms`, else 1. In scale n, without op 0, or 1.
// rows       sums of squares of the leaves as they are, (hi, lo, exponent), as in struct Normalized.
// nonfinite  how many elements are NaN or infinite.
// norms      of the leaves divided by loss_scale.
// ops        (mode, a, b), as in enum Mode.
// extremes   e is 2 with the attribute `extremes`: the largest magnitude of all elements that are not NaN, of the
//            leaves as they are, and the number of elements equal to zero. Else 0.
// Attributes of norm and clip: those three, and on_nonfinite s32, as in enum OnNonfinite. Of scale: per_leaf.
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

struct NormAttributes {
  bool per_leaf, leaf_norms, extremes;
  int32_t on_nonfinite;
};

// What follows the context in the bindings of norm and clip.
template <class Binding>
auto bind_norm_operands(Binding context) {
  return std::move(context)
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .template Arg<ffi::AnyBuffer>()
      .RemainingArgs()
      .RemainingRets()
      .template Attrs<NormAttributes>();
}

static inline ffi::Error bind_norm(const char* target, const ffi::AnyBuffer& counted, const ffi::AnyBuffer& max_norm,
                                   const ffi::AnyBuffer& loss_scale, const ffi::RemainingArgs& args,
                                   const ffi::RemainingRets& rets, const NormAttributes& attributes,
                                   std::vector<Leaf>* leaves, NormOperands* operands) {
  if (attributes.per_leaf && !attributes.leaf_norms)
    return invalid(target, "attribute leaf_norms", "true beside per_leaf", "false");
  FFI_RETURN_IF_ERROR(to_leaves(target, args, leaves));
  const int64_t n = static_cast<int64_t>(leaves->size());
  const int64_t m = attributes.leaf_norms ? n + 1 : 1, k = attributes.per_leaf ? n + 1 : 1;
  const bool all_count = counted.element_count() == 0;
  operands->dtype = norm_dtype(*leaves);
  operands->counted = all_count ? nullptr : static_cast<const int32_t*>(counted.untyped_data());
  operands->max_norm = max_norm.untyped_data();
  operands->loss_scale = static_cast<const float*>(loss_scale.untyped_data());
  operands->num_leaves = static_cast<int32_t>(n);
  operands->per_leaf = attributes.per_leaf;
  operands->leaf_norms = attributes.leaf_norms;
  operands->on_nonfinite = static_cast<OnNonfinite>(attributes.on_nonfinite);
  const ffi::DataType type = ffi_type(operands->dtype);
  void* nonfinite = nullptr;
  void* extremes = nullptr;
  FFI_RETURN_IF_ERROR(check(target, "counted", counted, ffi::DataType::S32, all_count ? 0 : n));
  FFI_RETURN_IF_ERROR(check(target, "max_norm", max_norm, type, 1));
  FFI_RETURN_IF_ERROR(check(target, "loss_scale", loss_scale, ffi::DataType::F32, 1));
  FFI_RETURN_IF_ERROR(result(target, "rows", rets, 0, type, 3 * m, &operands->rows));
  FFI_RETURN_IF_ERROR(result(target, "nonfinite", rets, 1, ffi::DataType::S32, m, &nonfinite));
  FFI_RETURN_IF_ERROR(result(target, "norms", rets, 2, type, m, &operands->norms));
  FFI_RETURN_IF_ERROR(result(target, "ops", rets, 3, type, 3 * k, &operands->ops));
  FFI_RETURN_IF_ERROR(result(target, "extremes", rets, 4, type, attributes.extremes ? 2 : 0, &extremes));
  operands->nonfinite = static_cast<int32_t*>(nonfinite);
  operands->extremes = attributes.extremes ? extremes : nullptr;
  return ffi::Error::Success();
}
constexpr size_t kNormResults = 5;

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

static inline ffi::Error bind_clip(const ffi::AnyBuffer& counted, const ffi::AnyBuffer& max_norm,
                                   const ffi::AnyBuffer& loss_scale, const ffi::RemainingArgs& args,
                                   const ffi::RemainingRets& rets, const NormAttributes& attributes,
                                   AliasedLeaves* aliased, NormOperands* operands) {
  FFI_RETURN_IF_ERROR(bind_norm("clip", counted, max_norm, loss_scale, args, rets, attributes, &aliased->leaves,
                                operands));
  return bind_aliased("clip", args, rets, kNormResults, aliased);
}

}  // namespace globalclip

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(globalclip::NormAttributes, StructMember<bool>("per_leaf"),
                                      StructMember<bool>("leaf_norms"), StructMember<bool>("extremes"),
                                      StructMember<int32_t>("on_nonfinite"));
