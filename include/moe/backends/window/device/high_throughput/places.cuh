// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/places.cuh: which row of which rank each token gets, from counts that blocks and ranks exchange;
// and who moves which token. Spec 04 §7.1, §7.2.
#pragma once

#include <cuda_bf16.h>

#include "moe/backends/window/device/high_throughput/layout.hpp"
#include "moe/backends/window/device/low_latency/dispatch.cuh"
#include "moe/core/ptx/named_barrier.cuh"

namespace moe::detail {

struct HighThroughputDispatch {
  comm::WindowView window;
  HighThroughputLayout at;
  int tokens_bound = 0;
  std::int32_t const* tokens_device = nullptr;
  int max_tokens = 0, hidden = 0, topk = 0, num_experts = 0, local_experts = 0, capacity = 0, alignment = 1;
  int piece_bytes = 1024;  ///< of a row, stored to all its ranks before the next piece; a multiple of 16
  bool lists = true;
  std::uint32_t tag = 0;
  int parity = 0;          ///< where the rows go
  int routing_parity = 0;  ///< whose places are used; equal to parity unless cached
  bool cached = false;     ///< same routing as the call that filled routing_parity: no layout, no counts
  bool pow2_scales = false;
  float amax_floor = 1e-10F;
  __nv_bfloat16 const* x = nullptr;  ///< [M][x_stride]
  std::int64_t x_stride = 0;
  std::int32_t const* ids = nullptr;           ///< [M][k]
  std::int32_t const* expert_place = nullptr;  ///< [num_ids] where an id's expert is, rank * L + local; null: the id itself
  int num_ids = 0;
  std::uint32_t refused = 0;       ///< 1 + ErrorCode: this rank only tells its peers that it cannot take part
  float const* weights = nullptr;  ///< [M][k]
};

/// What the threads of a block tell each other.
struct HighThroughputBlock {
  int num_rows;   ///< that this rank receives
  int failed;     ///< a wait failed
  int overflown;  ///< some rank would receive more rows than it has room for: all blocks of all ranks find the same
};

inline constexpr int kPlannersMeet = 1;  ///< named barrier of the warps that work out places

/// A gap that the alignment leaves in the own list. By a whole warp.
__device__ inline void fill_gap(HighThroughputDispatch const& a, int from, int to) {
#pragma unroll 1
  for (int i = from + static_cast<int>(threadIdx.x) % 32; a.lists && i < to; i += 32) {
    comm::detail::own<std::int32_t>(a.window, a.at.list[a.parity])[i] = -1;
  }
}

/// Places of the `tokens` tokens of this rank, and what it receives, by the first `warps` warps of each block; `shared` holds their
/// tables: (warps + 2) * (E + R) words, zero.
__device__ inline void high_throughput_places(HighThroughputDispatch const& a, HighThroughputBlock& state, unsigned char* shared,
                                              std::uint32_t round, int tokens, int warps) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const threads = 32 * warps;
  int const lane = tid % 32;
  int const warp = tid / 32;
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  int const R = w.size;
  int const me = w.rank;
  int const K = a.topk;
  int const E = a.num_experts;
  int const L = a.local_experts;
  int const N = E + R;
  std::int32_t* const summary = own<std::int32_t>(w, a.at.summary[a.routing_parity]);
  auto meet = [&] { ptx::named_barrier(kPlannersMeet, threads); };
  int* const counts = reinterpret_cast<int*>(shared);  // [warps][N]: rows of the block before each warp's tokens, later before its next
  int* const base = counts + warps * N;                // [N] first place of this block's rows
  int* const all = base + N;                           // [N] rows of all ranks
  int const t_first = first_token(tokens, block, blocks);
  int const n = first_token(tokens, block + 1, blocks) - t_first;
  int const w_first = t_first + n * warp / warps;
  int const w_last = t_first + n * (warp + 1) / warps;
  auto ranks_of = [&](int t) {
    std::uint32_t mask = 0;
#pragma unroll 8
    for (int j = 0; j < K; ++j) {
      int const e = expert_of(a.ids[t * K + j], a.expert_place, a.num_ids);
      if (e >= 0) {
        mask |= 1U << (e / L);
      }
    }
    return mask;
  };
  std::uint32_t first_ranks = 0;  // of this lane's first token
#pragma unroll 1
  for (int t = w_first + lane; t < w_last; t += 32) {
    std::uint32_t mask = 0;
#pragma unroll 1
    for (int j0 = 0; j0 < K; j0 += 8) {
      int chosen[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        chosen[j] = j0 + j < K ? a.ids[t * K + j0 + j] : -1;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (int const e = expert_of(chosen[j], a.expert_place, a.num_ids); e >= 0) {
          atomicAdd(&counts[warp * N + e], 1);
          mask |= 1U << (e / L);
        }
      }
    }
    first_ranks = t == w_first + lane ? mask : first_ranks;
#pragma unroll 1
    for (; mask != 0; mask &= mask - 1) {
      atomicAdd(&counts[warp * N + E + __ffs(mask) - 1], 1);
    }
  }
  meet();
  std::uint32_t* const histogram = own<std::uint32_t>(w, a.at.histogram);
#pragma unroll 1
  for (int e = tid; e < N; e += threads) {
    int sum = 0;
#pragma unroll 1
    for (int v = 0; v < warps; ++v) {
      int const c = counts[v * N + e];
      counts[v * N + e] = sum;
      sum += c;
    }
    ptx::store_relaxed_system(&histogram[block * N + e], static_cast<std::uint32_t>(sum));
  }
  meet();
  if (tid == 0) {
    __threadfence();  // the readers are blocks of this GPU
    ptx::store_relaxed_system(own<std::uint32_t>(w, a.at.counted) + block, round);
  }
#pragma unroll 1
  for (int b = tid; b < blocks; b += threads) {
    if (!wait_round(w, own<std::uint32_t>(w, a.at.counted) + b, round, comm::ExchangePhase::dispatch_counts, me)) {
      state.failed = 1;
    }
  }
  meet();
#pragma unroll 1
  for (int e = tid; e < N; e += threads) {
    int before = 0;
    int total = 0;
#pragma unroll 8
    for (int b = 0; b < blocks; ++b) {
      int const c = static_cast<int>(ptx::load_relaxed_system(&histogram[b * N + e]));
      before += b < block ? c : 0;
      total += c;
    }
    base[e] = before;
    if (e % blocks == block) {
#pragma unroll 1
      for (int i = 0; i < R; ++i) {
        int const r = (me + i) % R;
        ptx::store_relaxed_system(at<std::uint64_t>(w, r, a.at.counts[a.parity]) + static_cast<std::size_t>(me) * N + e,
                                  comm::count_word(round, a.tag, static_cast<std::uint32_t>(total)));
      }
    }
  }
  // What every rank brings. All blocks of all ranks see the same numbers and so judge the capacity alike, before a row moves.
  std::uint64_t const* const words = own<std::uint64_t>(w, a.at.counts[a.parity]);
  note_count_waits(w, words, N, round, a.tag);
#pragma unroll 1
  for (int e = tid; e < N; e += threads) {
    int const lower = sum_counts(w, words + e, N, 0, me, round, a.tag);
    int const upper = sum_counts(w, words + e, N, me, R, round, a.tag);
    int const total = lower + upper;
    if (lower < 0 || upper < 0) {
      state.failed = 1;
    }
    base[e] += lower;
    all[e] = total;
    if (e >= E && total > a.capacity) {
      state.overflown = 1;
      report(w, ErrorCode::capacity, comm::ExchangePhase::dispatch_counts, e - E, round, 0, static_cast<std::uint32_t>(total),
             static_cast<std::uint32_t>(a.capacity), true);
    }
  }
  meet();
  bool const overflown = state.overflown != 0;
  // First list entry of every expert on its rank: aligned counts, summed.
#pragma unroll 1
  for (int r = warp; r < R; r += warps) {
    int start = 0;
#pragma unroll 1
    for (int c = 0; c < L; c += 32) {
      int const le = c + lane;
      int const count = le < L ? all[r * L + le] : 0;
      int const padded = (count + a.alignment - 1) / a.alignment * a.alignment;
      int sum = padded;
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
        int const other = __shfl_up_sync(0xffffffffU, sum, o);
        sum += lane >= o ? other : 0;
      }
      int const first = start + sum - padded;
      if (le < L) {
        base[r * L + le] += first;
        if (r == me && block == 0) {
          summary[2 + le] = overflown ? 0 : count;
          summary[2 + L + le] = overflown ? 0 : first;
        }
      }
      bool const gap = r == me && le < L && le % blocks == block && padded > count && !overflown;
#pragma unroll 1
      for (unsigned left = __ballot_sync(0xffffffffU, gap); left != 0; left &= left - 1) {
        int const from = __ffs(left) - 1;
        fill_gap(a, __shfl_sync(0xffffffffU, first + count, from), __shfl_sync(0xffffffffU, first + padded, from));
      }
      start += __shfl_sync(0xffffffffU, sum, 31);
    }
    if (r == me && lane == 0) {
      int const rows = state.failed != 0 || overflown ? 0 : all[E + me];
      state.num_rows = rows;
      if (block == 0) {
        summary[0] = rows;
        summary[1] = overflown ? 0 : start;
      }
    }
  }
  meet();
  int* const place = counts + warp * N;
  std::int32_t* const sent_rows = own<std::int32_t>(w, a.at.sent_rows[a.routing_parity]);
  std::int32_t* const sent_slots = own<std::int32_t>(w, a.at.sent_slots[a.routing_parity]);
  if (a.lists) {
    constexpr int kAtOnce = 4;
#pragma unroll 1
    for (int c = w_first * K; c < w_last * K; c += 32 * kAtOnce) {
      int chosen[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        int const i = c + 32 * k + lane;
        chosen[k] = i < w_last * K ? expert_of(a.ids[i], a.expert_place, a.num_ids) : -1;
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        int const i = c + 32 * k + lane;
        int const e = chosen[k];
        unsigned const same = __match_any_sync(0xffffffffU, e);
        int const earlier = __popc(same & ((1U << lane) - 1U));
        int const start = e >= 0 ? place[e] : 0;
        __syncwarp();
        if (e >= 0 && earlier == 0) {
          place[e] = start + __popc(same);
        }
        __syncwarp();
        if (i < w_last * K) {
          sent_slots[i] = e >= 0 && !overflown ? base[e] + start + earlier : -1;
        }
      }
    }
  }
#pragma unroll 1
  for (int c = w_first; c < w_last; c += 32) {
    int const t = c + lane;
    std::uint32_t const wanted = c == w_first ? first_ranks : t < w_last ? ranks_of(t) : 0;
    std::uint32_t const mask = overflown ? 0 : wanted;  // an overflow sends nothing anywhere
#pragma unroll 1
    for (int r = 0; r < R; ++r) {
      bool const there = ((mask >> r) & 1U) != 0;
      unsigned const with = __ballot_sync(0xffffffffU, there);
      int const start = place[E + r];
      if (t < w_last) {
        sent_rows[t * R + r] = there ? base[E + r] + start + __popc(with & ((1U << lane) - 1U)) : -1;
      }
      __syncwarp();
      if (lane == 0) {
        place[E + r] = start + __popc(with);
      }
      __syncwarp();
    }
  }
}

/// The tokens of a rank, handed out one at a time: each block has a range and a ticket, and a warp whose range is used up goes on with the
/// range that has most left. The place of a row does not depend on who moves it.
class HighThroughputTickets {
 public:
  /// `next`: [blocks] key() | next token, or what an earlier round left.
  __device__ HighThroughputTickets(std::uint64_t* next, std::uint32_t round, int tokens)
      : next_(next), round_(round), tokens_(tokens), blocks_(static_cast<int>(gridDim.x)) {
    take_from(static_cast<int>(blockIdx.x));
  }
  /// One thread, when the places of the range's tokens are written and its block has met: other blocks may take from it now.
  __device__ void open_range(int first) const {
    __threadfence();
    ptx::store_relaxed_system(next_ + from_, key() | static_cast<std::uint32_t>(first));
  }
  /// Asks for a token; the answer, which counts in lane 0, is for take(). Apart so that a warp can work on meanwhile.
  __device__ std::uint64_t ask() const {
    bool const asks = threadIdx.x % 32 == 0;
    return asks ? atomicAdd(reinterpret_cast<unsigned long long*>(next_ + from_), 1ULL) : 0;
  }
  /// The token that was asked for, or that of another range; -1: none is left. By a whole warp.
  __device__ int take(std::uint64_t ticket) {
#pragma unroll 1
    for (;; ticket = ask()) {
      ticket = __shfl_sync(0xffffffffU, ticket, 0);
      if (!is_open(ticket)) {
        continue;  // the own range, which the first thread opens right now
      }
      if (int const t = token(ticket); t < last_) {
        return t;
      }
      std::uint32_t most = 0;  // tokens left, block
#pragma unroll 1
      for (int b = static_cast<int>(threadIdx.x) % 32; b < blocks_; b += 32) {
        std::uint64_t const seen = ptx::load_relaxed_system(next_ + b);
        int const left = first_token(tokens_, b + 1, blocks_) - token(seen);
        if (is_open(seen) && left > 0) {
          most = max(most, (static_cast<std::uint32_t>(left) << 8) | static_cast<std::uint32_t>(b));
        }
      }
      most = __reduce_max_sync(0xffffffffU, most);
      if (most == 0) {
        return -1;
      }
      take_from(static_cast<int>(most & 0xffU));
      __threadfence();  // before the places of that range are read
    }
  }

 private:
  /// No word that another round or nobody has written begins with it.
  __device__ std::uint64_t key() const { return static_cast<std::uint64_t>(round_) << 32 | 0x80000000U; }
  __device__ bool is_open(std::uint64_t ticket) const { return ticket >> 31 == key() >> 31; }
  __device__ static int token(std::uint64_t ticket) { return static_cast<int>(ticket & 0x7fffffffU); }
  __device__ void take_from(int block) {
    from_ = block;
    last_ = first_token(tokens_, block + 1, blocks_);
  }

  std::uint64_t* next_;
  std::uint32_t round_;
  int tokens_, blocks_;
  int from_ = 0;  ///< range that this warp takes from
  int last_ = 0;  ///< its end
};
static_assert(kMaxExchangeBlocks <= 256);

}  // namespace moe::detail
