// The three stages over one chunk on a CPU, once for each instruction set that kernels_cpu.cc is compiled for.
#pragma once

#include "clip_math.h"

namespace globalclip {

// `next` is what the thread will read after the chunk: its beginning is asked for in time.
struct CpuKernels {
  SumSquares (*sum_squares)(const Chunk&, const void* next);
  SumSquares (*sum_squares_and_extremes)(const Chunk&, const void* next, Extremes*);
  void (*scale_float)(const Chunk&, const void* next, const ScaleOp<float>&);
  void (*scale_double)(const Chunk&, const void* next, const ScaleOp<double>&);
};

extern const CpuKernels kCpuKernelsBaseline;
extern const CpuKernels kCpuKernelsAvx2;

}  // namespace globalclip
