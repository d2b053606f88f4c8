// SPDX-License-Identifier: Apache-2.0
// backends/window/device/one_sided/combine.cuh: outputs pulled from the ranks that computed them. docs/semantics/exchange.md §10.
#pragma once

#include "moe/backends/window/device/one_sided/dispatch.cuh"

namespace moe::detail {

struct OneSidedCombine : PeerParams<OneSidedLayout> {
  std::uint64_t active = 0;
  int runtime_max = 0;
  __nv_bfloat16* out = nullptr;  ///< [M][out_stride]
  std::int64_t out_stride = 0;
};

static __global__ void __launch_bounds__(kPeerThreads, 1) one_sided_combine(OneSidedCombine const __grid_constant__ a) {
  using namespace comm::detail;
  __shared__ Terms terms[kQuads];
  __shared__ int failed;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const quad = tid / kQuadThreads;
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);

  begin_dependent_kernel();
  std::uint32_t const round = next_round(w, a.at.combined);
  if (tid == 0) {
    failed = 0;
  }
  __syncthreads();
  std::uint32_t refusal = 0;
  if (tid < w.size && ((a.active >> tid) & 1U) != 0) {
    if (block == 0) {  // the experts' kernel has ended: peers may read its rows
      publish(at<std::uint32_t>(w, tid, a.at.ready) + w.rank, round);
    }
    if (!wait_round(w, own<std::uint32_t>(w, a.at.ready) + tid, round, comm::ExchangePhase::combine_rows, tid)) {
      failed = 1;
    } else if (block == 0) {
      refusal = load_refusal(w, tid, round);
    }
  }
  __syncthreads();
  int const M = failed != 0 ? 0 : a.tokens.count();
#pragma unroll 1
  for (int t = block + blocks * quad; t < M; t += blocks * kQuads) {
    if (tid % kQuadThreads < 32) {
      RankChoice const choice = rank_choice(a.tokens, t, lane, a.topk, a.local_experts, a.active);
      unsigned const used = __ballot_sync(0xffffffffU, choice.first);
      if (choice.first) {
        int const position = own<std::int32_t>(w, a.at.send_index[a.parity])[t * a.topk + lane];
        std::size_t const row = static_cast<std::size_t>(w.rank) * a.runtime_max + position;
        int const i = __popc(used & ((1U << lane) - 1U));
        terms[quad].row[i] = w.peer[choice.rank] + a.at.outputs[a.parity] + row * a.hidden * 2;
        terms[quad].weight[i] = 1.0F;
      }
      if (lane == 0) {
        terms[quad].count = __popc(used);
      }
    }
    sync_quad(quad);
    sum_terms(terms[quad], t, a.hidden, a.out + t * a.out_stride);
    sync_quad(quad);
  }
  report_refusal(w, refusal, comm::ExchangePhase::combine_rows, tid, round);
  __syncthreads();
  if (tid == 0) {
    end_round(w, a.at.combined, round);
  }
}

/// Whether a row of the workspace was sent in the last dispatch of a parity.
struct OneSidedRowIsUsed {
  std::uint64_t const* counts;  ///< [rank]
  int runtime_max;
  __device__ bool operator()(int row) const { return row % runtime_max < static_cast<int>(comm::word_count(counts[row / runtime_max])); }
};

}  // namespace moe::detail
