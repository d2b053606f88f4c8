// SPDX-License-Identifier: Apache-2.0
// comm/arrivals.cuh: the wait of a kernel for the rows of one expert.
#pragma once

#include "moe/comm/arrivals.hpp"
#include "moe/comm/symmetric_memory.cuh"

namespace moe::comm::detail {

/// Waits until this rank's count at `p` is that of the count word `expected` from `peer`, or gives up.
static __device__ __noinline__ void wait_count(WindowView const& w, std::uint32_t const* p, std::uint64_t expected, int peer) {
  std::uint64_t start = 0;
  for (unsigned i = 0;; ++i) {
    std::uint32_t const seen = ptx::load_acquire_system(p);
    if (seen >= word_count(expected)) {
      return;
    }
    if (i == 0) {
      start = ptx::now_ns();
    } else if (i % 256 == 0 && should_give_up(w, ExchangePhase::dispatch_rows, peer, word_round(expected), seen, start)) {
      return;
    }
  }
}

/// One warp: waits until all rows of local expert `expert` are complete, a rank per lane. Ordinary loads after it see them. Gives up by the
/// deadline, or when the group has ended; the failure then names the rank whose rows are missing, and the rows have any contents.
__device__ inline void wait_arrivals(Arrivals const& a, int expert) {
  if (int const lane = static_cast<int>(threadIdx.x) % 32; lane < a.window.size) {
    wait_count(a.window, a.arrived + lane * a.experts + expert, a.expected[lane * a.stride + expert], lane);
  }
  __syncwarp();
}

}  // namespace moe::comm::detail
