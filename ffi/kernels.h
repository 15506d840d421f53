// The three stages on a GPU, in plain CUDA types: each function puts one launch on `stream` and does nothing else, so
// that it may be captured into a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

#include "clip_math.h"

namespace globalclip {

// Stage 1 over the leaves of `table`: partials[table.chunk_offset + i] is chunk i's sum of squares, as exact as a norm
// of `dtype` needs it.
cudaError_t launch_grad_norm_partial(cudaStream_t stream, const LeafTable& table, DType dtype, SumSquares* partials);

// Stage 2 over the leaves of `table`: leaf_totals[table.first_leaf + i] is leaf i's sum. The launch for the table that
// ends with the last of `num_leaves` leaves also writes what `operands` name, for the whole tree.
cudaError_t launch_grad_norm_final(cudaStream_t stream, const LeafTable& table, const SumSquares* partials,
                                   Total* leaf_totals, int32_t num_leaves, const NormOperands& operands);
cudaError_t launch_grad_norm_final(cudaStream_t stream, const LeafTable& table, const SumSquares* partials,
                                   Total* leaf_totals, int32_t num_leaves, const SumsOperands& operands);

// Stage 3 over the leaves of `table`, in place.
cudaError_t launch_grad_scale(cudaStream_t stream, const LeafTable& table, const ScaleOperands& operands);

}  // namespace globalclip
