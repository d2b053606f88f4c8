// SPDX-License-Identifier: Apache-2.0
// comm/completions.cuh: how a kernel of the experts says that a block of columns is complete.
#pragma once

#include "moe/comm/completions.hpp"
#include "moe/comm/symmetric_memory.cuh"

namespace moe::comm::detail {

/// One warp: tells every rank, one per lane, that all rows of this rank are complete in column block `block`. A thread that acquires the
/// word sees what happened before the call in the calling threads. Repeating it in a round changes nothing.
__device__ inline void complete_columns(Completions const& c, int block) {
  WindowView const& w = c.window;
  if (int const lane = static_cast<int>(threadIdx.x) % 32; lane < w.size) {
    publish(at<std::uint32_t>(w, lane, c.ready) + block * w.size + w.rank, *c.round);
  }
  __syncwarp();
}

}  // namespace moe::comm::detail
