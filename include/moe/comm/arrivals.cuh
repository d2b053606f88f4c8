// SPDX-License-Identifier: Apache-2.0
// comm/arrivals.cuh: the wait of a kernel for the rows of one expert.
#pragma once

#include "moe/comm/arrivals.hpp"
#include "moe/comm/symmetric_memory.cuh"

namespace moe::comm::detail {

/// One warp: waits until all rows of local expert `expert` are complete, a rank per lane. Ordinary loads after it see them. Gives up by the
/// deadline, or when the group has ended; the failure then names the rank whose rows are missing, and the rows have any contents.
__device__ inline void wait_arrivals(Arrivals const& a, int expert) {
  if (int const lane = static_cast<int>(threadIdx.x) % 32; lane < a.window.size) {
    std::uint32_t const rows = word_count(a.expected[lane * a.stride + expert]);
    wait_round(a.window, a.arrived + lane * a.experts + expert, rows, ExchangePhase::dispatch_rows, lane);
  }
  __syncwarp();
}

}  // namespace moe::comm::detail
