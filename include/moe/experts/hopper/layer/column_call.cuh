// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/column_call.cuh: the host's part of a call in blocks of columns, and what tells the blocks of a call whose kernels
// have none.
#pragma once

#include <algorithm>

#include "moe/comm/completions.cuh"
#include "moe/core/error.hpp"
#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/common/problem.hpp"
#include "moe/experts/hopper/layer/column_blocks.cuh"

namespace moe::hopper::detail {

/// E_ARG for blocks of columns that no call can have; `kernels`: the layer has kernels with them.
inline void check_columns(LayerCall const& call, Tuning const& t, int hidden, bool kernels) {
  if (t.column_blocks < 0 || t.column_blocks > kMostColumnBlocks) {
    throw Error(ErrorCode::argument, text("column_blocks ", t.column_blocks, " is out of range [0, ", kMostColumnBlocks, "]"));
  }
  if (t.column_blocks > 0 && !kernels) {
    throw Error(ErrorCode::argument, text("column_blocks is ", t.column_blocks,
                                          ", and this layer was built without kernels that have blocks of columns, so it must be 0. Build "
                                          "it with launcher_with_columns() in bf16 or fp8_block"));
  }
  if (call.completions == nullptr) return;
  comm::Completions const& c = *call.completions;
  if (c.round == nullptr) throw Error(ErrorCode::argument, "hopper experts: round of the completions is null");
  if (c.window.size < 1 || c.window.size > 32) {
    throw Error(ErrorCode::argument,
                text("hopper experts: completions of ", c.window.size, " ranks, at most 32, one for each lane of a warp"));
  }
  if (!covers({c.blocks, c.columns}, hidden)) {
    throw Error(ErrorCode::argument,
                text("hopper experts: completions in ", c.blocks, " blocks of ", c.columns, " columns, hidden is ", hidden, ": at most ",
                     kMostColumnBlocks, " blocks of a multiple of ", kColumnStep, " columns must cover it"));
  }
}

/// The blocks of a call that a kernel with blocks of columns computes. None: neither asked for, nor a sum to make.
inline ColumnCut cut_of(LayerCall const& call, Tuning const& t, LocalShape const& shape) {
  if (call.completions != nullptr) return {call.completions->blocks, call.completions->columns};
  if (t.column_blocks == 0 || shape.topk == 1) return {0, 0};
  return cut_columns(shape.hidden, t.column_blocks);
}

/// The CTAs of a layer kernel.
struct LayerGrid {
  int size;  ///< whole clusters
  int cluster;
  int free;  ///< multiprocessors without one
};

/// `call` of the same blocks as `cut` if it has completions.
inline ColumnBlocks column_blocks(LayerCall const& call, ColumnCut const& cut, AlignArgs const& a, LayerGrid const& grid) {
  ColumnBlocks c{};
  c.cut = cut;
  c.sum_tokens = tokens_of_sums(cut.columns);
  c.multiplied = a.next_unit + kColumnCounters;
  c.summed = c.multiplied + kMostColumnBlocks;
  if (call.completions == nullptr) return c;
  c.completions = *call.completions;
  int const wanted = std::max(0, c.completions.combine_blocks - grid.free);
  int const half = grid.size / (2 * grid.cluster) * grid.cluster;  // the rest of the products would take too long on fewer
  c.leaving = std::min((wanted + grid.cluster - 1) / grid.cluster * grid.cluster, half);
  return c;
}

/// One warp, behind the kernels of a call: all blocks are complete.
static __global__ void tell_all_columns(comm::Completions const __grid_constant__ c) {
  launch_dependents();
  wait_for_dependencies();
  for (int block = 0; block < c.blocks; ++block) comm::detail::complete_columns(c, block);
}

inline void launch_tell(comm::Completions const& c, cudaStream_t stream) { launch(tell_all_columns, 1, 32, 0, 1, stream, c); }

}  // namespace moe::hopper::detail
