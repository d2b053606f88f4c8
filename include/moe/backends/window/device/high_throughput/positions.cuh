// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/positions.cuh: which row of which rank each token gets, from counts that blocks and ranks
// exchange. One function per step of the planners, the first warps of every block. docs/semantics/exchange.md §7.1, §7.2.
#pragma once

#include <cuda_bf16.h>

#include "moe/backends/window/device/common/rows.cuh"
#include "moe/backends/window/device/high_throughput/params.hpp"
#include "moe/core/ptx/named_barrier.cuh"

namespace moe::detail {

struct HighThroughputDispatch : HighThroughputKernelParams {
  ExchangeTokens in;
  ScaleRule scales;
  HighThroughputParity parity;
  int piece_bytes = 1024;        ///< of a row, stored to all its ranks before the next piece; a multiple of 16
  bool cached = false;           ///< same routing as the call that filled parity.routing: skips layout and counts
  std::uint32_t refused = 0;     ///< 1 + ErrorCode: this rank only tells its peers that it cannot take part
  bool counts_arrivals = false;  ///< the layout has counts of arrivals
  bool arriving = false;         ///< high_throughput_dispatch sends all but the rows, which high_throughput_rows moves after it
};

/// State that the threads of a block share.
struct HighThroughputBlock {
  int num_rows;   ///< rows that this rank receives
  int failed;     ///< a wait failed
  int overflown;  ///< some rank would receive more rows than its capacity; all blocks of all ranks find the same
};

inline constexpr int kPlannersMeet = 1;  ///< named barrier of the planners

/// The state of one planner thread, and the tables of its block.
struct HighThroughputPlan {
  int warps;  ///< planners of each block
  std::uint32_t round;
  int N;                ///< counts of a rank: E experts, then R ranks
  int* counts;          ///< [warps][N]: rows of the block before each warp's tokens; later before the warp's next token
  int* base;            ///< [N] position of this block's first row
  int* all;             ///< [N] rows of all ranks
  int w_first, w_last;  ///< tokens of this warp

  /// `shared`: (warps + 2) * N words, zero.
  __device__ HighThroughputPlan(HighThroughputDispatch const& a, unsigned char* shared, std::uint32_t round, int tokens, int warps)
      : warps(warps), round(round), N(a.num_experts + a.window.size), counts(reinterpret_cast<int*>(shared)) {
    base = counts + warps * N;
    all = base + N;
    int const block = static_cast<int>(blockIdx.x);
    int const blocks = static_cast<int>(gridDim.x);
    int const t_first = first_token(tokens, block, blocks);
    int const n = first_token(tokens, block + 1, blocks) - t_first;
    w_first = t_first + n * warp() / warps;
    w_last = t_first + n * (warp() + 1) / warps;
  }
  __device__ static int tid() { return static_cast<int>(threadIdx.x); }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int warp() { return static_cast<int>(threadIdx.x) / 32; }
  __device__ int threads() const { return 32 * warps; }
  __device__ void meet() const { ptx::named_barrier(kPlannersMeet, threads()); }
};

/// Fills a gap that the alignment leaves in this rank's list. By a whole warp.
__device__ inline void fill_gap(HighThroughputDispatch const& a, int from, int to) {
#pragma unroll 1
  for (int i = from + static_cast<int>(threadIdx.x) % 32; a.lists && i < to; i += 32) {
    comm::detail::own<std::int32_t>(a.window, a.at.list[a.parity.rows])[i] = -1;
  }
}

/// The ranks of token t, one bit each.
__device__ inline std::uint32_t ranks_of(HighThroughputDispatch const& a, int t) {
  std::uint32_t mask = 0;
#pragma unroll 8
  for (int j = 0; j < a.topk; ++j) {
    int const e = expert_of(a.in.ids[t * a.topk + j], a.experts);
    if (e >= 0) {
      mask |= 1U << (e / a.local_experts);
    }
  }
  return mask;
}

/// Counts the warp's tokens by expert and by rank. Returns the ranks of this lane's first token.
__device__ inline std::uint32_t count_tokens(HighThroughputDispatch const& a, HighThroughputPlan const& p) {
  int* const counts = p.counts + p.warp() * p.N;
  int const K = a.topk;
  std::uint32_t first_ranks = 0;
#pragma unroll 1
  for (int t = p.w_first + p.lane(); t < p.w_last; t += 32) {
    std::uint32_t mask = 0;
#pragma unroll 1
    for (int j0 = 0; j0 < K; j0 += 8) {
      int chosen[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        chosen[j] = j0 + j < K ? a.in.ids[t * K + j0 + j] : -1;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (int const e = expert_of(chosen[j], a.experts); e >= 0) {
          atomicAdd(&counts[e], 1);
          mask |= 1U << (e / a.local_experts);
        }
      }
    }
    first_ranks = t == p.w_first + p.lane() ? mask : first_ranks;
#pragma unroll 1
    for (; mask != 0; mask &= mask - 1) {
      atomicAdd(&counts[a.num_experts + __ffs(mask) - 1], 1);
    }
  }
  return first_ranks;
}

/// Publishes the block's histogram to the other blocks of the rank, then waits for theirs.
__device__ inline void exchange_histograms(HighThroughputDispatch const& a, HighThroughputPlan const& p, HighThroughputBlock& state) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const block = static_cast<int>(blockIdx.x);
  std::uint32_t* const histogram = own<std::uint32_t>(w, a.at.histogram);
#pragma unroll 1
  for (int e = p.tid(); e < p.N; e += p.threads()) {
    int sum = 0;
#pragma unroll 1
    for (int v = 0; v < p.warps; ++v) {
      int const c = p.counts[v * p.N + e];
      p.counts[v * p.N + e] = sum;
      sum += c;
    }
    ptx::store_relaxed_system(&histogram[block * p.N + e], static_cast<std::uint32_t>(sum));
  }
  p.meet();

  if (p.tid() == 0) {
    __threadfence();  // the readers are blocks of this GPU
    ptx::store_relaxed_system(own<std::uint32_t>(w, a.at.counted) + block, p.round);
  }
#pragma unroll 1
  for (int b = p.tid(); b < static_cast<int>(gridDim.x); b += p.threads()) {
    if (!wait_round(w, own<std::uint32_t>(w, a.at.counted) + b, p.round, comm::ExchangePhase::dispatch_counts, w.rank)) {
      state.failed = 1;
    }
  }
  p.meet();
}

/// Adds up the histograms; sends this block's share of the counts to every rank.
__device__ inline void send_counts(HighThroughputDispatch const& a, HighThroughputPlan const& p) {
  comm::WindowView const& w = a.window;
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  std::uint32_t* const histogram = comm::detail::own<std::uint32_t>(w, a.at.histogram);
#pragma unroll 1
  for (int e = p.tid(); e < p.N; e += p.threads()) {
    int before = 0;
    int total = 0;
#pragma unroll 8
    for (int b = 0; b < blocks; ++b) {
      int const c = static_cast<int>(ptx::load_relaxed_system(&histogram[b * p.N + e]));
      before += b < block ? c : 0;
      total += c;
    }
    p.base[e] = before;
    if (e % blocks == block) {
#pragma unroll 1
      for (int i = 0; i < w.size; ++i) {
        int const r = (w.rank + i) % w.size;
        ptx::store_relaxed_system(
            comm::detail::at<std::uint64_t>(w, r, a.at.counts[a.parity.rows]) + static_cast<std::size_t>(w.rank) * p.N + e,
            comm::count_word(p.round, a.tag, static_cast<std::uint32_t>(total)));
      }
    }
  }
}

/// Waits for the counts of every rank. All blocks of all ranks see the same numbers, so they agree on the capacity before a row moves.
__device__ inline void receive_counts(HighThroughputDispatch const& a, HighThroughputPlan const& p, HighThroughputBlock& state) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  std::uint64_t const* const words = own<std::uint64_t>(w, a.at.counts[a.parity.rows]);
  note_count_waits(w, words, p.N, p.round, a.tag);
#pragma unroll 1
  for (int e = p.tid(); e < p.N; e += p.threads()) {
    int const lower = sum_counts(w, words + e, p.N, 0, w.rank, p.round, a.tag);
    int const upper = sum_counts(w, words + e, p.N, w.rank, w.size, p.round, a.tag);
    int const total = lower + upper;
    if (lower < 0 || upper < 0) {
      state.failed = 1;
    }
    p.base[e] += lower;
    p.all[e] = total;
    if (e >= a.num_experts && total > a.capacity) {
      state.overflown = 1;
      report(w, ErrorCode::capacity, comm::ExchangePhase::dispatch_counts, e - a.num_experts, p.round, 0, static_cast<std::uint32_t>(total),
             static_cast<std::uint32_t>(a.capacity), true);
    }
  }
  p.meet();
}

/// First list entry of every expert on its rank: prefix sum of the aligned counts. One warp per rank; for this rank also the summary.
__device__ inline void lay_out_lists(HighThroughputDispatch const& a, HighThroughputPlan const& p, HighThroughputBlock& state) {
  comm::WindowView const& w = a.window;
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  int const lane = p.lane();
  int const L = a.local_experts;
  bool const overflown = state.overflown != 0;
  std::int32_t* const summary = comm::detail::own<std::int32_t>(w, a.at.summary[a.parity.routing]);
#pragma unroll 1
  for (int r = p.warp(); r < w.size; r += p.warps) {
    int start = 0;
#pragma unroll 1
    for (int c = 0; c < L; c += 32) {
      int const le = c + lane;
      int const count = le < L ? p.all[r * L + le] : 0;
      int const padded = (count + a.alignment - 1) / a.alignment * a.alignment;
      int sum = padded;
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
        int const other = __shfl_up_sync(0xffffffffU, sum, o);
        sum += lane >= o ? other : 0;
      }
      int const first = start + sum - padded;
      if (le < L) {
        p.base[r * L + le] += first;
        if (r == w.rank && block == 0) {
          summary[2 + le] = overflown ? 0 : count;
          summary[2 + L + le] = overflown ? 0 : first;
        }
      }
      bool const gap = r == w.rank && le < L && le % blocks == block && padded > count && !overflown;
#pragma unroll 1
      for (unsigned left = __ballot_sync(0xffffffffU, gap); left != 0; left &= left - 1) {
        int const from = __ffs(left) - 1;
        fill_gap(a, __shfl_sync(0xffffffffU, first + count, from), __shfl_sync(0xffffffffU, first + padded, from));
      }
      start += __shfl_sync(0xffffffffU, sum, 31);
    }
    if (r == w.rank && lane == 0) {
      int const rows = state.failed != 0 || overflown ? 0 : p.all[a.num_experts + w.rank];
      state.num_rows = rows;
      if (block == 0) {
        summary[0] = rows;
        summary[1] = overflown ? 0 : start;
      }
    }
  }
  p.meet();
}

/// The row position of each choice of the warp's tokens in its expert's list.
__device__ inline void find_choices(HighThroughputDispatch const& a, HighThroughputPlan const& p, bool overflown) {
  constexpr int kAtOnce = 4;
  int* const next = p.counts + p.warp() * p.N;
  std::int32_t* const sent_positions = comm::detail::own<std::int32_t>(a.window, a.at.sent_positions[a.parity.routing]);
  int const end = p.w_last * a.topk;
#pragma unroll 1
  for (int c = p.w_first * a.topk; c < end; c += 32 * kAtOnce) {
    int chosen[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      int const i = c + 32 * k + p.lane();
      chosen[k] = i < end ? expert_of(a.in.ids[i], a.experts) : -1;
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      int const i = c + 32 * k + p.lane();
      int const e = chosen[k];
      unsigned const same = __match_any_sync(0xffffffffU, e);
      int const earlier = __popc(same & ((1U << p.lane()) - 1U));
      int const start = e >= 0 ? next[e] : 0;
      __syncwarp();
      if (e >= 0 && earlier == 0) {
        next[e] = start + __popc(same);
      }
      __syncwarp();
      if (i < end) {
        sent_positions[i] = e >= 0 && !overflown ? p.base[e] + start + earlier : -1;
      }
    }
  }
}

/// The row of each token of the warp at each rank; none after an overflow.
__device__ inline void find_rows(HighThroughputDispatch const& a, HighThroughputPlan const& p, bool overflown, std::uint32_t first_ranks) {
  int const R = a.window.size;
  int const E = a.num_experts;
  int* const next = p.counts + p.warp() * p.N;
  std::int32_t* const sent_rows = comm::detail::own<std::int32_t>(a.window, a.at.sent_rows[a.parity.routing]);
#pragma unroll 1
  for (int c = p.w_first; c < p.w_last; c += 32) {
    int const t = c + p.lane();
    std::uint32_t const wanted = c == p.w_first ? first_ranks : t < p.w_last ? ranks_of(a, t) : 0;
    std::uint32_t const mask = overflown ? 0 : wanted;
#pragma unroll 1
    for (int r = 0; r < R; ++r) {
      bool const there = ((mask >> r) & 1U) != 0;
      unsigned const with = __ballot_sync(0xffffffffU, there);
      int const start = next[E + r];
      if (t < p.w_last) {
        sent_rows[t * R + r] = there ? p.base[E + r] + start + __popc(with & ((1U << p.lane()) - 1U)) : -1;
      }
      __syncwarp();
      if (p.lane() == 0) {
        next[E + r] = start + __popc(with);
      }
      __syncwarp();
    }
  }
}

/// Computes the row positions of this rank's tokens, and the rows that it receives, in the planners of each block. They wait for the
/// histograms of the rank's other blocks, then for the counts of the other ranks.
__device__ inline void high_throughput_positions(HighThroughputDispatch const& a, HighThroughputBlock& state, HighThroughputPlan const& p) {
  std::uint32_t const first_ranks = count_tokens(a, p);
  p.meet();

  exchange_histograms(a, p, state);
  send_counts(a, p);
  receive_counts(a, p, state);
  bool const overflown = state.overflown != 0;

  lay_out_lists(a, p, state);
  if (a.lists) {
    find_choices(a, p, overflown);
  }
  find_rows(a, p, overflown, first_ranks);
}

}  // namespace moe::detail
