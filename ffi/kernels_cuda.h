// The three stages on a GPU, in plain CUDA types: each function puts one launch on `stream` and does nothing else, so
// that it may be captured into a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include "clip_math.h"

namespace globalclip {

// What is on its way from one stage to the next, by the chunks and the leaves of the whole tree.
struct Workspace {
  SumSquares* partials;
  Extremes* extremes;
  Total* leaf_totals;
};

// Stage 1 over the leaves of `table`: partials[table.chunk_offset + i] is chunk i's sum of squares, as exact as a norm
// of the operands' dtype needs it, and extremes[table.chunk_offset + i] its extremes, where the operands want them.
cudaError_t launch_grad_norm_partial(cudaStream_t stream, const LeafTable& table, const Workspace& workspace,
                                     const NormOperands& operands);

// Stage 2 over the leaves of `table`: leaf_totals[table.first_leaf + i] is leaf i's sum. The launch for the table that
// ends with the last leaf also writes what `operands` name, for the whole tree.
cudaError_t launch_grad_norm_final(cudaStream_t stream, const LeafTable& table, const Workspace& workspace,
                                   const NormOperands& operands);

// Stage 3 over the leaves of `table`, in place.
cudaError_t launch_grad_scale(cudaStream_t stream, const LeafTable& table, const ScaleOperands& operands);

}  // namespace globalclip
