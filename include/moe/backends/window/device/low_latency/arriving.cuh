// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/arriving.cuh: the counts of a low-latency dispatch whose rows may still be on their way when the
// experts start. docs/semantics/exchange.md §8.1.
//
// Senders add pieces of rows to counters at the receiver, in every round. The receiver knows from the counts of rows what comes in the
// round. It never clears a counter, since no rank could tell when; it takes off what came in the round before, which commutes with what its
// peers add. What was to come in an earlier round has come: a rank's counts of this round follow its rows of all rounds before.
#pragma once

#include "moe/backends/window/device/low_latency/dispatch_send.cuh"
#include "moe/comm/arrivals.cuh"

namespace moe::detail {

/// A dispatch that counts. The fields of its base lie where they lie without it.
struct LowLatencyArriving : LowLatencyDispatch {
  static constexpr bool kCountsRows = true;
  std::size_t arrived = 0;   ///< LowLatencyCounters::arrived of the parity
  std::size_t expected = 0;  ///< LowLatencyCounters::expected of the parity
  bool awaits_rows = true;   ///< with `receive`: the kernel ends when all rows have come; else when their number is known
};

template <class Args>
inline constexpr bool kCountsRows = requires { Args::kCountsRows; };

/// All warps, after all rows and words of the block are stored and the block has synchronised: adds the pieces of each row that this block
/// has sent to the counter of its expert. Each thread that adds fences the block's stores first.
template <class Args>
__device__ inline void count_pieces(Args const& a, LowLatencyCall const& call, LowLatencyShare const& own, LowLatencyTables const& shared) {
  comm::WindowView const& w = a.window;
  int const pieces = call.pieces.per_token;
  bool fenced = false;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < own.choices; i += kLowLatencyThreads) {
    if (shared.row_target[i] == nullptr) {
      continue;
    }
    if (!fenced) {
      ptx::fence_system();
      fenced = true;
    }
    int const t = own.t_first + i / a.topk;
    int const sent = min(own.last, (t + 1) * pieces) - max(own.first, t * pieces);
    int const dst = shared.rank_of[i];
    std::uint32_t* const arrived = comm::detail::at<std::uint32_t>(w, dst, a.arrived);
    atomicAdd_system(arrived + w.rank * a.local_experts + shared.expert[i] - dst * a.local_experts, static_cast<std::uint32_t>(sent));
  }
}

/// One warp of each block, a rank a lane, for this block's share of the experts: waits for the counts of all ranks and adds them up. Takes
/// what the parity's round before has brought off the counters, and notes what this round brings. With `awaits_rows` it then waits for it.
template <class Args>
__device__ inline void receive_counts(Args const& a, LowLatencyCall const& call) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  std::uint64_t const* const counts = own<std::uint64_t>(w, a.at.counts[a.parity]);
  if (!a.send && note_count_waits(w, counts + a.num_experts, a.at.count_stride, call.round, a.tag)) {
    __syncthreads();
  }
  if (tid < 64 || tid >= 64 + 32) {
    return;
  }
  int const lane = tid - 64;
#pragma unroll 1
  for (int le = static_cast<int>(blockIdx.x); le < a.local_experts; le += blocks) {
    int rows = 0;
    std::uint64_t word = 0;
    std::uint32_t* const arrived = own<std::uint32_t>(w, a.arrived) + lane * a.local_experts + le;
    if (lane < w.size) {
      std::uint64_t const* const column = counts + w.rank * a.local_experts + le;
      int const tokens = sum_counts(w, counts + a.num_experts, a.at.count_stride, lane, lane + 1, call.round, a.tag);
      rows = tokens < 0 ? -1 : sum_counts(w, column, a.at.count_stride, lane, lane + 1, call.round, a.tag);
      int const pieces = rows > 0 ? LowLatencyPieces(tokens, a.hidden, blocks, kDispatchStep).per_token : 0;
      word = comm::count_word(call.round, a.tag, static_cast<std::uint32_t>(max(rows, 0) * pieces));
      std::uint64_t* const expected = own<std::uint64_t>(w, a.expected) + lane * a.local_experts + le;
      ptx::fence_system();  // what the peer added before it sent its counts comes before this
      atomicAdd_system(arrived, 0U - comm::word_count(*expected));
      *expected = word;
    }
    bool const failed = __any_sync(0xffffffffU, rows < 0) != 0;
    int const sum = __reduce_add_sync(0xffffffffU, max(rows, 0));
    if (lane == 0) {
      a.expert_num_tokens[le] = failed ? 0 : sum;
      if (a.expert_totals != nullptr && !failed) {
        a.expert_totals[le] += sum;
      }
    }
    if (a.awaits_rows && lane < w.size && !failed) {
      wait_count(w, arrived, word, lane);
    }
    __syncwarp();
  }
}

}  // namespace moe::detail
