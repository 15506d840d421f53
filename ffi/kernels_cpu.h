// The three stages over one chunk on a CPU, once for each instruction set that kernels_cpu.cc is compiled for.
#pragma once

#include "clip_math.h"

namespace globalclip {

struct CpuKernels {
  SumSquares (*sum_squares)(const Chunk&);
  void (*scale_float)(const Chunk&, const ScaleOp<float>&);
  void (*scale_double)(const Chunk&, const ScaleOp<double>&);
};

extern const CpuKernels kCpuKernelsBaseline;
extern const CpuKernels kCpuKernelsAvx2;

}  // namespace globalclip
