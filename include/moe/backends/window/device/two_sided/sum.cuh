// SPDX-License-Identifier: Apache-2.0
// backends/window/device/two_sided/sum.cuh: the sum of the returned outputs. docs/semantics/exchange.md §11.
#pragma once

#include "moe/backends/window/device/two_sided/plan.cuh"

namespace moe::detail {

struct TwoSidedSum : PeerParams<TwoSidedLayout> {
  __nv_bfloat16* out = nullptr;  ///< [M][out_stride]
  std::int64_t out_stride = 0;
};

/// Adds the returned outputs of each token, ranks ascending.
static __global__ void __launch_bounds__(kPeerThreads, 1) two_sided_sum(TwoSidedSum const __grid_constant__ a) {
  using namespace comm::detail;
  __shared__ Terms terms[kQuads];
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const quad = tid / kQuadThreads;
  int const R = w.size;

  begin_dependent_kernel();
  int const M = a.tokens.count();
  TwoSidedSummary const summary(own<std::int32_t>(w, a.at.summary[a.parity]), R);
  bool const watches = blockIdx.x == 0 && tid < R;
  std::uint32_t const round = watches ? *own<std::uint32_t>(w, a.at.round_of[a.parity]) : 0;
  PeerRefusals refusals;
  if (watches) {
    refusals.load(w, tid);
  }
#pragma unroll 1
  for (int t = static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) * quad; t < M; t += static_cast<int>(gridDim.x) * kQuads) {
    if (tid % kQuadThreads < 32) {
      int const position = lane < R ? own<std::int32_t>(w, a.at.send_positions[a.parity])[t * R + lane] : -1;
      unsigned const used = __ballot_sync(0xffffffffU, position >= 0);
      if (position >= 0) {
        int const i = __popc(used & ((1U << lane) - 1U));
        terms[quad].row[i] = own<char>(w, a.at.returned) + static_cast<std::size_t>(summary.first_back[lane] + position) * a.hidden * 2;
        terms[quad].weight[i] = 1.0F;
      }
      if (lane == 0) {
        terms[quad].count = __popc(used);
      }
    }
    sync_quad(quad);
    sum_terms(terms[quad], 0, a.hidden, a.out + t * a.out_stride);
    sync_quad(quad);
  }
  if (watches) {
    refusals.report_combine(w, tid, round);
  }
}

/// Whether a received row exists.
struct TwoSidedRowIsUsed {
  std::int32_t const* num_rows;
  __device__ bool operator()(int row) const { return row < *num_rows; }
};

}  // namespace moe::detail
