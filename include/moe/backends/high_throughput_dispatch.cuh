// SPDX-License-Identifier: Apache-2.0
// backends/high_throughput_dispatch.cuh: layout, counts and rows in one kernel of few blocks; the copy engine moves the rows. Spec 04 §7.
//
// Each block owns a contiguous range of tokens. Blocks exchange histograms on the rank, ranks exchange counts, and then every place is
// known: the row of a token at each rank (sources in rank order, tokens in order) and the place of each choice in the expert-major list.
// Then each warp takes tokens: quantises one into shared memory once and lets the copy engine store it to every rank that wants it.
#pragma once

#include <cuda_bf16.h>

#include "moe/backends/high_throughput_layout.hpp"
#include "moe/backends/low_latency_dispatch.cuh"
#include "moe/comm/bulk_copy.cuh"

namespace moe::detail {

inline constexpr int kHighThroughputWarps = 16;
inline constexpr int kHighThroughputShared = 220 * 1024;  ///< bytes of dynamic shared memory that one block may take

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

/// Bytes of one warp's row.
inline int high_throughput_row_shared(HighThroughputShape const& s) {
  int const bytes = s.fp8 ? s.hidden + 4 * s.groups() : 2 * s.hidden;
  return (bytes + 127) / 128 * 128;
}
inline int high_throughput_dispatch_warps(HighThroughputShape const& s) {
  return std::clamp(kHighThroughputShared / high_throughput_row_shared(s), 1, kHighThroughputWarps);
}
/// Shared memory: the histograms of the layout phase and the rows of the copy phase share the same place.
inline std::size_t high_throughput_dispatch_shared(HighThroughputShape const& s) {
  auto const warps = static_cast<std::size_t>(high_throughput_dispatch_warps(s));
  auto const n = static_cast<std::size_t>(s.num_experts + s.ranks);
  return std::max(4 * n * (warps + 2), warps * static_cast<std::size_t>(high_throughput_row_shared(s)));
}

template <bool kFp8>
__global__ void __launch_bounds__(32 * kHighThroughputWarps, 1) high_throughput_dispatch(HighThroughputDispatch const __grid_constant__ a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ std::uint64_t loaded[kHighThroughputWarps];
  __shared__ int next_token;
  __shared__ int num_rows;
  __shared__ int failed;
  __shared__ int overflown;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const threads = static_cast<int>(blockDim.x);
  int const lane = tid % 32;
  int const warp = tid / 32;
  int const warps = threads / 32;
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  int const R = w.size;
  int const me = w.rank;
  int const K = a.topk;
  int const E = a.num_experts;
  int const L = a.local_experts;
  int const N = E + R;

  begin_dependent_kernel();
  std::uint32_t const round = own<std::uint32_t>(w, a.at.sent)[block] + 1;
  int const M = a.tokens_device != nullptr ? min(*a.tokens_device, a.tokens_bound) : a.tokens_bound;
  int const t_first = static_cast<int>(static_cast<std::int64_t>(M) * block / blocks);
  int const t_last = static_cast<int>(static_cast<std::int64_t>(M) * (block + 1) / blocks);
  std::int32_t* const sent_rows = own<std::int32_t>(w, a.at.sent_rows[a.routing_parity]);
  std::int32_t* const sent_slots = own<std::int32_t>(w, a.at.sent_slots[a.routing_parity]);
  std::int32_t* const summary = own<std::int32_t>(w, a.at.summary[a.routing_parity]);

  if (tid == 0) {
    failed = 0;
    overflown = 0;
    next_token = t_first;
  }
  if (lane == 0) {
    barrier_init(&loaded[warp], 1);
    fence_shared_to_bulk();
  }

  // The gaps that the alignment leaves in the own list.
  auto fill_gap = [&](int from, int to) {
#pragma unroll 1
    for (int i = from; a.lists && i < to; ++i) {
      own<std::int32_t>(w, a.at.list[a.parity])[i] = -1;
    }
  };
  if (a.cached) {
    if (tid == 0) {
      num_rows = summary[0];
    }
#pragma unroll 1
    for (int le = block + blocks * tid; le < L; le += blocks * threads) {
      int const end = summary[2 + L + le] + summary[2 + le];
      fill_gap(end, (end + a.alignment - 1) / a.alignment * a.alignment);
    }
  } else {
    int* const counts = reinterpret_cast<int*>(shared);  // [warps][N]: rows before each warp's tokens, later the next free place
    int* const base = counts + warps * N;                // [N] first place of this block's rows
    int* const all = base + N;                           // [N] rows of all ranks
    int const n = t_last - t_first;
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
#pragma unroll 1
    for (int i = tid; i < warps * N; i += threads) {
      counts[i] = 0;
    }
    __syncthreads();
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
#pragma unroll 1
      for (; mask != 0; mask &= mask - 1) {
        atomicAdd(&counts[warp * N + E + __ffs(mask) - 1], 1);
      }
    }
    __syncthreads();
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
      store_relaxed(&histogram[block * N + e], static_cast<std::uint32_t>(sum));
    }
    __syncthreads();
    if (tid == 0) {
      __threadfence();  // the readers are blocks of this GPU
      store_relaxed(own<std::uint32_t>(w, a.at.counted) + block, round);
    }
#pragma unroll 1
    for (int b = tid; b < blocks; b += threads) {
      if (!wait_round(w, own<std::uint32_t>(w, a.at.counted) + b, round, comm::ExchangePhase::dispatch_counts, me)) {
        failed = 1;
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int e = tid; e < N; e += threads) {
      int before = 0;
      int total = 0;
#pragma unroll 8
      for (int b = 0; b < blocks; ++b) {
        int const c = static_cast<int>(load_relaxed(&histogram[b * N + e]));
        before += b < block ? c : 0;
        total += c;
      }
      base[e] = before;
      if (e % blocks == block) {
#pragma unroll 1
        for (int i = 0; i < R; ++i) {
          int const r = (me + i) % R;
          store_relaxed(at<std::uint64_t>(w, r, a.at.counts[a.parity]) + static_cast<std::size_t>(me) * N + e,
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
      failed = lower < 0 || upper < 0 ? 1 : failed;
      base[e] += lower;
      all[e] = total;
      if (e >= E && total > a.capacity) {
        overflown = 1;
        report(w, ErrorCode::capacity, comm::ExchangePhase::dispatch_counts, e - E, round, 0, static_cast<std::uint32_t>(total),
               static_cast<std::uint32_t>(a.capacity), true);
      }
    }
    __syncthreads();
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
        if (le < L) {
          int const first = start + sum - padded;
          base[r * L + le] += first;
          if (r == me && block == 0) {
            summary[2 + le] = overflown != 0 ? 0 : count;
            summary[2 + L + le] = overflown != 0 ? 0 : first;
          }
          if (r == me && le % blocks == block && overflown == 0) {
            fill_gap(first + count, first + padded);
          }
        }
        start += __shfl_sync(0xffffffffU, sum, 31);
      }
      if (r == me && lane == 0) {
        num_rows = failed != 0 || overflown != 0 ? 0 : all[E + me];
        if (block == 0) {
          summary[0] = num_rows;
          summary[1] = overflown != 0 ? 0 : start;
        }
      }
    }
    __syncthreads();
#pragma unroll 1
    for (int i = tid; i < warps * N; i += threads) {
      counts[i] += base[i % N];
    }
    __syncthreads();
    int* const place = counts + warp * N;
    if (a.lists) {
#pragma unroll 1
      for (int c = w_first * K; c < w_last * K; c += 32) {
        int const i = c + lane;
        int const e = i < w_last * K ? expert_of(a.ids[i], a.expert_place, a.num_ids) : -1;
        unsigned const same = __match_any_sync(0xffffffffU, e);
        int const earlier = __popc(same & ((1U << lane) - 1U));
        int const start = e >= 0 ? place[e] : 0;
        __syncwarp();
        if (e >= 0 && earlier == 0) {
          place[e] = start + __popc(same);
        }
        __syncwarp();
        if (i < w_last * K) {
          sent_slots[i] = e >= 0 && overflown == 0 ? start + earlier : -1;
        }
      }
    }
#pragma unroll 1
    for (int c = w_first; c < w_last; c += 32) {
      int const t = c + lane;
      std::uint32_t const mask = t < w_last && overflown == 0 ? ranks_of(t) : 0;  // an overflow sends nothing anywhere
#pragma unroll 1
      for (int r = 0; r < R; ++r) {
        bool const there = ((mask >> r) & 1U) != 0;
        unsigned const with = __ballot_sync(0xffffffffU, there);
        int const start = place[E + r];
        if (t < w_last) {
          sent_rows[t * R + r] = there ? start + __popc(with & ((1U << lane) - 1U)) : -1;
        }
        __syncwarp();
        if (lane == 0) {
          place[E + r] = start + __popc(with);
        }
        __syncwarp();
      }
    }
  }
  __syncthreads();

  if (failed == 0 && overflown == 0) {
    int const groups = (a.hidden + 127) / 128;
    unsigned char* const row = shared + warp * (((kFp8 ? a.hidden + 4 * groups : 2 * a.hidden) + 127) / 128 * 128);
    bool const wide = groups % 4 == 0;
    std::uint32_t phase = 0;
#pragma unroll 1
    for (;;) {
      int t = 0;
      if (lane == 0) {
        t = atomicAdd(&next_token, 1);
      }
      t = __shfl_sync(0xffffffffU, t, 0);
      if (t >= t_last) {
        break;
      }
      // Each lane serves a rank, and which one comes first changes from rank to rank and from token to token.
      int to_rank = lane + (me + t) % R;
      to_rank = to_rank >= R ? to_rank - R : to_rank;
      int const to_row = lane < R ? sent_rows[t * R + to_rank] : -1;
      int const e = lane < K ? expert_of(a.ids[t * K + lane], a.expert_place, a.num_ids) : -1;
      float const weight = lane < K ? a.weights[t * K + lane] : 0.0F;
      int const slot = a.lists && lane < K ? sent_slots[t * K + lane] : -1;
      unsigned const ranks = __ballot_sync(0xffffffffU, to_row >= 0);
      if (ranks == 0) {
        continue;
      }
      uint4 const* const x = reinterpret_cast<uint4 const*>(a.x + t * a.x_stride);
      if constexpr (kFp8) {
        constexpr int kBatch = 7;
        float* const scales = reinterpret_cast<float*>(row + a.hidden);
        int const units = a.hidden / 16;
#pragma unroll 1
        for (int u0 = 0; u0 < units; u0 += 32 * kBatch) {
          uint4 v[kBatch][2];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            int const u = u0 + 32 * i + lane;
            v[i][0] = u < units ? x[2 * u] : uint4{};
            v[i][1] = u < units ? x[2 * u + 1] : uint4{};
          }
          if (u0 == 0) {
            bulk_wait_read();  // the row that this warp sent before has left shared memory; the loads above did not wait for it
            __syncwarp();
          }
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            int const u = u0 + 32 * i + lane;
            float scale;
            uint4 const codes = quantize_sixteen(v[i], a.amax_floor, a.pow2_scales, scale);
            if (u < units) {
              reinterpret_cast<uint4*>(row)[u] = codes;
              if (u % 8 == 0) {
                scales[u / 8] = scale;
              }
            }
          }
        }
        fence_shared_to_bulk();
        __syncwarp();
      } else {
        bulk_wait_read();
        __syncwarp();
        if (lane == 0) {
          barrier_expect(&loaded[warp], 2 * a.hidden);
          bulk_load(row, x, 2 * a.hidden, &loaded[warp]);
        }
        __syncwarp();
        barrier_wait(&loaded[warp], phase);
        phase ^= 1;
      }
      char* const to = to_row < 0 ? nullptr : w.peer[to_rank] + a.at.rows[a.parity] + static_cast<std::size_t>(to_row) * a.at.row_bytes;
#pragma unroll 1
      for (int offset = 0; offset < a.at.row_bytes; offset += a.piece_bytes) {
        if (to_row >= 0) {
          bulk_store(to + offset, row + offset, min(a.piece_bytes, a.at.row_bytes - offset));
        }
        __syncwarp();
      }
      if (to_row >= 0) {
        if (kFp8 && wide) {
          bulk_store(w.peer[to_rank] + a.at.scales[a.parity] + static_cast<std::size_t>(to_row) * a.at.scale_stride * 4, row + a.hidden,
                     groups * 4);
        }
        bulk_commit();
      }
      int const dst = e >= 0 ? e / L : -1;
#pragma unroll 1
      for (unsigned left = ranks; left != 0; left &= left - 1) {
        int const from = __ffs(left) - 1;
        int const r = __shfl_sync(0xffffffffU, to_rank, from);
        auto const index = static_cast<std::size_t>(__shfl_sync(0xffffffffU, to_row, from));
        bool const mine = dst == r;
        // One store of the warp per record of up to 128 bytes: word i is choice i % K of part i / K.
        std::uint32_t const parts[3] = {static_cast<std::uint32_t>(mine ? e - r * L : -1), mine ? __float_as_uint(weight) : 0U,
                                        static_cast<std::uint32_t>(mine ? slot : -1)};
        std::uint32_t* const record = at<std::uint32_t>(w, r, a.at.records[a.parity]) + index * a.at.record_words;
        int const used = (a.lists ? 3 : 2) * K;
#pragma unroll 1
        for (int c = 0; c < a.at.record_words; c += 32) {
          int const i = c + lane;
          int const j = i < K ? i : i < 2 * K ? i - K : i - 2 * K;
          std::uint32_t const id = __shfl_sync(0xffffffffU, parts[0], j & 31);
          std::uint32_t const bits = __shfl_sync(0xffffffffU, parts[1], j & 31);
          std::uint32_t const place = __shfl_sync(0xffffffffU, parts[2], j & 31);
          if (i < a.at.record_words) {
            record[i] = i >= used ? static_cast<std::uint32_t>(me * a.max_tokens + t) : i < K ? id : i < 2 * K ? bits : place;
          }
        }
        if (a.lists && mine) {
          at<std::int32_t>(w, r, a.at.list[a.parity])[slot] = static_cast<std::int32_t>(index);
        }
        if (kFp8 && !wide) {
#pragma unroll 1
          for (int g = lane; g < groups; g += 32) {
            at<float>(w, r, a.at.scales[a.parity])[index * a.at.scale_stride + g] = reinterpret_cast<float const*>(row + a.hidden)[g];
          }
        }
      }
    }
    bulk_wait();
    fence_bulk();
    __syncthreads();
    if (tid < R) {
      if (a.refused != 0 && block == 0) {
        refuse(w, tid, round, a.refused);
      }
      publish(at<std::uint32_t>(w, tid, a.at.arrive) + me * kMaxExchangeBlocks + block, round);
    }
    // What no sender writes: ids of the rows past the last one.
#pragma unroll 1
    for (int r = num_rows + block * warps + warp; r < a.capacity; r += blocks * warps) {
      if (lane < K) {
        own<std::int32_t>(w, a.at.records[a.parity])[static_cast<std::size_t>(r) * a.at.record_words + lane] = -1;
      }
    }
    if (tid < R &&
        wait_round(w, own<std::uint32_t>(w, a.at.arrive) + tid * kMaxExchangeBlocks + block, round, comm::ExchangePhase::dispatch_rows,
                   tid) &&
        block == 0) {
      check_refusal(w, comm::ExchangePhase::dispatch_rows, tid, round);
    }
  } else if (overflown != 0) {
#pragma unroll 1
    for (int r = block * warps + warp; r < a.capacity; r += blocks * warps) {
      if (lane < K) {
        own<std::int32_t>(w, a.at.records[a.parity])[static_cast<std::size_t>(r) * a.at.record_words + lane] = -1;
      }
    }
  }
  __syncthreads();
  if (tid == 0) {
#pragma unroll 1
    for (int b = block; b < kMaxExchangeBlocks; b += blocks) {
      own<std::uint32_t>(w, a.at.sent)[b] = round;
    }
  }
}

}  // namespace moe::detail
