// SPDX-License-Identifier: Apache-2.0
// backends/window/device/one_sided/dispatch.cuh: rows pushed to positions that the sender chooses. docs/semantics/exchange.md §10.
//
// Each source has its own part at every rank, so a row's position depends on no count of another rank: the first row leaves at once.
// Which row of the part a token gets depends on timing; which outputs are added, and in which order, does not.
#pragma once

#include "moe/backends/window/device/common/peer_rows.cuh"
#include "moe/backends/window/device/one_sided/exchange.hpp"

namespace moe::detail {

struct OneSidedDispatch : PeerParams<OneSidedLayout> {
  std::uint64_t active = 0;  ///< ranks that take part
  PeerTags tags;
  int runtime_max = 0;
};

/// This lane's choice: its rank, or -1, and whether it is the token's first choice for that rank.
struct RankChoice {
  int expert;  ///< rank * L + local
  int rank;
  bool first;
};
__device__ inline RankChoice rank_choice(PeerTokens const& in, int t, int lane, int topk, int local_experts, std::uint64_t active) {
  int const e = lane < topk ? in.place(t * topk + lane) : -1;
  int const rank = e >= 0 && ((active >> (e / local_experts)) & 1U) != 0 ? e / local_experts : -1;
  unsigned const same = __match_any_sync(0xffffffffU, rank);
  return {e, rank, rank >= 0 && (same & ((1U << lane) - 1U)) == 0};
}

template <bool kFp8>
__global__ void __launch_bounds__(kPeerThreads, 1) one_sided_dispatch(OneSidedDispatch const __grid_constant__ a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ std::uint64_t loaded[kPeerThreads / 32];
  __shared__ int position_of[kQuads][32];
  __shared__ int count;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const warp = tid / 32;
  int const quad = tid / kQuadThreads;
  int const part = warp % (kQuadThreads / 32);
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  int const R = w.size;
  int const me = w.rank;
  int const K = a.topk;
  int const L = a.local_experts;

  begin_dependent_kernel();
  std::uint32_t const round = next_round(w, a.at.sent);
  int const M = a.tokens.count();
  std::uint32_t* const counters = own<std::uint32_t>(w, a.at.send_counters[a.parity]);
  int const values = part_values(a.hidden, kQuadThreads / 32);
  int const from = part * values;
  WarpStage<kFp8> stage(shared + warp * staged_bytes(kFp8, values), &loaded[warp], lane);

#pragma unroll 1
  for (int t = block + blocks * quad; t < M; t += blocks * kQuads) {  // neighbouring tokens on different blocks
    RankChoice const choice = rank_choice(a.tokens, t, lane, K, L, a.active);
    if (part == 0) {
      int const position = choice.first ? static_cast<int>(atomicAdd(&counters[choice.rank], 1U)) : -1;
      position_of[quad][lane] = position;
      if (lane < K) {
        own<std::int32_t>(w, a.at.send_index[a.parity])[t * K + lane] = position;
      }
    }
    stage.fill(a.tokens.x + t * a.tokens.x_stride + from, max(0, min(values, a.hidden - from)), a.rule);
    sync_quad(quad);
    int const position = position_of[quad][lane];
    std::size_t const row = static_cast<std::size_t>(me) * a.runtime_max + (position >= 0 ? position : 0);
    char* const to = position >= 0 ? w.peer[choice.rank] : nullptr;
    stage.store(to == nullptr ? nullptr : to + a.at.rows[a.parity] + (row * a.hidden + from) * (kFp8 ? 1 : 2),
                to == nullptr ? nullptr : to + a.at.scales[a.parity] + (row * a.scale_stride + from / 128) * 4);
    // Local ids and weights: each warp serves a quarter of the destinations.
    float const weight = lane < K ? a.tokens.weights[t * K + lane] : 0.0F;
    int i = 0;
#pragma unroll 1
    for (unsigned left = __ballot_sync(0xffffffffU, position >= 0); left != 0; left &= left - 1, ++i) {
      if (i % (kQuadThreads / 32) != part) {
        continue;
      }
      int const from_lane = __ffs(left) - 1;
      int const r = __shfl_sync(0xffffffffU, choice.rank, from_lane);
      std::size_t const index =
          (static_cast<std::size_t>(me) * a.runtime_max + __shfl_sync(0xffffffffU, position, from_lane)) * static_cast<std::size_t>(K) +
          lane;
      if (lane < K) {
        at<std::int32_t>(w, r, a.at.ids[a.parity])[index] = choice.rank == r ? choice.expert - r * L : -1;
        at<float>(w, r, a.at.weights[a.parity])[index] = choice.rank == r ? weight : 0.0F;
      }
    }
    sync_quad(quad);  // position_of may be overwritten
  }
  finish_stores();
  if (is_last_block(own<std::uint32_t>(w, a.at.arrived))) {
    if (tid < R) {
      std::uint32_t const n = ptx::load_relaxed_system(&counters[tid]);
      counters[tid] = 0;
      if ((a.active >> tid) & 1U) {
        ptx::fence_system();
        ptx::store_relaxed_system(at<std::uint64_t>(w, tid, a.at.counts[a.parity]) + me, comm::count_word(round, a.tags.sent, n));
      }
    }
  }

  // Sources are distributed over the blocks; a block clears its share of the rows that its source did not use.
#pragma unroll 1
  for (int source = block % R; source < R; source += blocks) {
    __syncthreads();
    if (tid == 0) {
      bool const alive = ((a.active >> source) & 1U) != 0;
      count = alive ? sum_counts(w, own<std::uint64_t>(w, a.at.counts[a.parity]), 1, source, source + 1, round, a.tags.expected) : 0;
      ptx::fence_system();  // acquires the data that was released with the word
    }
    __syncthreads();
    int const share = block / R;
    int const shares = source < blocks ? (blocks - 1 - source) / R + 1 : 1;
    int const first = max(count, 0) * K;
    std::int32_t* const ids = own<std::int32_t>(w, a.at.ids[a.parity]) + static_cast<std::size_t>(source) * a.runtime_max * K;
#pragma unroll 1
    for (int i = first + share * kPeerThreads + tid; i < a.runtime_max * K; i += shares * kPeerThreads) {
      ids[i] = -1;
    }
  }
  __syncthreads();
  if (tid == 0) {
    end_round(w, a.at.sent, round);
  }
}

}  // namespace moe::detail
