// A step of AdamW over one chunk on a CPU, once for each instruction set that adamw_cpu.cc is compiled for.
#pragma once

#include "adamw_math.h"

namespace globalclip {

// Elements `begin` to `end` of a leaf, in place.
struct AdamwKernels {
  void (*step_float)(const StepLeaf&, int64_t begin, int64_t end, const ScaleOp<float>&, const Coefficients<float>&);
  void (*step_double)(const StepLeaf&, int64_t begin, int64_t end, const ScaleOp<double>&, const Coefficients<double>&);
};

extern const AdamwKernels kAdamwKernelsBaseline;
extern const AdamwKernels kAdamwKernelsAvx2;

}  // namespace globalclip
