// Included ahead of handlers_cuda.cc, after cuda_on_cpu.h: gives a handler that asks for a CUDA stream the one that
// cuda_on_cpu launches on, where XLA's own answer for the CPU would be an error.
#pragma once

#include <optional>

#include "xla/ffi/api/ffi.h"

namespace xla::ffi {

template <class Stream>
struct StreamOnCpu {};

template <class Stream>
struct CtxDecoding<StreamOnCpu<Stream>> {
  using Type = Stream;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return cuda_on_cpu::stream();
  }
};

}  // namespace xla::ffi

#define PlatformStream StreamOnCpu

#define CUDA_ON_CPU_EXPORT extern "C" __attribute__((visibility("default"), weak))

CUDA_ON_CPU_EXPORT uint64_t cuda_on_cpu_launches() { return cuda_on_cpu::launches; }

// The traits that a handler states when XLA asks it for its metadata.
CUDA_ON_CPU_EXPORT uint32_t cuda_on_cpu_traits(XLA_FFI_Handler* handler) {
  XLA_FFI_Metadata metadata{};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  metadata.api_version.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension{};
  extension.extension_base = {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata, nullptr};
  extension.metadata = &metadata;
  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  handler(&frame);
  return metadata.traits;
}
