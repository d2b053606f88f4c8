// SPDX-License-Identifier: Apache-2.0
// backends/window/device/two_sided/plan.cuh: which tokens go to which rank, and how many rows come from each. docs/semantics/exchange.md
// §11.
#pragma once

#include "moe/backends/window/device/common/peer_rows.cuh"
#include "moe/backends/window/device/two_sided/exchange.hpp"

namespace moe::detail {

/// The parts of a summary.
struct TwoSidedSummary {
  std::int32_t* rows;        ///< received
  std::int32_t* rows_for;    ///< [R] sent to each rank
  std::int32_t* rows_from;   ///< [R] received from each rank
  std::int32_t* first_from;  ///< [R] first row from each rank
  std::int32_t* first_back;  ///< [R] first returned output from each rank
  MOE_HD TwoSidedSummary(std::int32_t* at, int ranks)
      : rows(at), rows_for(at + 1), rows_from(rows_for + ranks), first_from(rows_from + ranks), first_back(first_from + ranks) {}
};

struct TwoSidedPlan : PeerParams<TwoSidedLayout> {
  PeerTags tags;
};

/// One block: which tokens go to which rank, in token order, and how many rows come from each rank.
static __global__ void __launch_bounds__(kPeerThreads, 1) two_sided_plan(TwoSidedPlan const __grid_constant__ a) {
  using namespace comm::detail;
  constexpr int kWarps = kPeerThreads / 32;
  __shared__ int ahead[32][kWarps];  // tokens of earlier warps that go to a rank
  __shared__ int total[32];
  __shared__ int from[32];
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const warp = tid / 32;
  int const R = w.size;

  begin_dependent_kernel();
  std::uint32_t const round = next_round(w, a.at.planned);
  int const M = a.tokens.count();
  std::int32_t* const send_tokens = own<std::int32_t>(w, a.at.send_tokens[a.parity]);
  std::int32_t* const send_positions = own<std::int32_t>(w, a.at.send_positions[a.parity]);
  if (tid < 32) {
    total[tid] = 0;
    from[tid] = 0;
  }
  __syncthreads();
#pragma unroll 1
  for (int t0 = 0; t0 < M; t0 += kPeerThreads) {
    int const t = t0 + tid;
    std::uint32_t ranks = 0;
#pragma unroll 1
    for (int j0 = 0; j0 < a.topk; j0 += 8) {
      int id[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // all loads are issued before the first is used
        id[j] = t < M && j0 + j < a.topk ? a.tokens.ids[t * a.topk + j0 + j] : -1;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        int const e = a.tokens.place_of(id[j]);
        ranks |= e >= 0 ? 1U << (e / a.local_experts) : 0U;
      }
    }
#pragma unroll 1
    for (int r = 0; r < R; ++r) {
      unsigned const with = __ballot_sync(0xffffffffU, ((ranks >> r) & 1U) != 0);
      if (lane == 0) {
        ahead[r][warp] = __popc(with);
      }
    }
    __syncthreads();
    if (tid < R) {
      int sum = total[tid];
#pragma unroll
      for (int v = 0; v < kWarps; ++v) {
        int const n = ahead[tid][v];
        ahead[tid][v] = sum;
        sum += n;
      }
      total[tid] = sum;
    }
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < R; ++r) {
      bool const there = ((ranks >> r) & 1U) != 0;
      unsigned const with = __ballot_sync(0xffffffffU, there);
      int const position = ahead[r][warp] + __popc(with & ((1U << lane) - 1U));
      if (t < M) {
        send_positions[t * R + r] = there ? position : -1;
        if (there) {
          send_tokens[r * a.max_tokens + position] = t;
        }
      }
    }
    __syncthreads();
  }
  // Words are indexed by round, not by call parity: a rank without rows may be a plan ahead and must not overwrite this plan's.
  if (tid < R) {
    ptx::store_relaxed_system(at<std::uint64_t>(w, tid, a.at.counts[round % 2]) + w.rank,
                              comm::count_word(round, a.tags.sent, static_cast<std::uint32_t>(total[tid])));
    from[tid] = sum_counts(w, own<std::uint64_t>(w, a.at.counts[round % 2]), 1, tid, tid + 1, round, a.tags.expected);
  }
  __syncthreads();
  if (tid == 0) {
    TwoSidedSummary const summary(own<std::int32_t>(w, a.at.summary[a.parity]), R);
    int first_from = 0;
    int first_back = 0;
    bool over = false;  // then no row moves: a rank that disagrees may have its queues elsewhere
#pragma unroll 1
    for (int r = 0; r < R; ++r) {
      over = over || from[r] < 0;
    }
#pragma unroll 1
    for (int r = 0; r < R; ++r) {
      summary.rows_for[r] = over ? 0 : total[r];
      summary.rows_from[r] = over ? 0 : from[r];
      summary.first_from[r] = first_from;
      summary.first_back[r] = first_back;
      first_from += summary.rows_from[r];
      first_back += total[r];
    }
    *summary.rows = first_from;
    *own<std::uint32_t>(w, a.at.round_of[a.parity]) = round;
    end_round(w, a.at.planned, round);
  }
}

}  // namespace moe::detail
