// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/dispatch.cuh: layout, counts and rows in one kernel of few blocks; the copy engine moves the rows.
// Spec 04 §7.
//
// Each block owns a contiguous range of tokens. Blocks exchange histograms on the rank, ranks exchange counts, and then every place is
// known: the row of a token at each rank (sources in rank order, tokens in order) and the place of each choice in the expert-major list.
// Meanwhile the warps that are not needed for that make their first row ready. Then each warp takes tokens, of its block's range first and
// then of slower blocks: quantises one into shared memory once and lets the copy engine store it to every rank that wants it.
#pragma once

#include "moe/backends/window/device/high_throughput/places.cuh"
#include "moe/core/ptx/bulk_copy.cuh"
#include "moe/core/ptx/mbarrier.cuh"

namespace moe::detail {

inline constexpr int kHighThroughputWarps = 16;
inline constexpr int kHighThroughputShared = 220 * 1024;  ///< bytes of dynamic shared memory that one block may take

/// Bytes of one warp's row.
MOE_HD inline int high_throughput_row_shared(int hidden, bool fp8) {
  int const bytes = fp8 ? hidden + 4 * ((hidden + 127) / 128) : 2 * hidden;
  return (bytes + 127) / 128 * 128;
}
inline int high_throughput_dispatch_warps(HighThroughputShape const& s) {
  return std::clamp(kHighThroughputShared / high_throughput_row_shared(s.hidden, s.fp8), 1, kHighThroughputWarps);
}
/// Bytes before the rows of the warps that need not wait for the places: the tables of the others, and later their rows.
MOE_HD inline int high_throughput_planned_shared(int n, int planners, int row_shared) {
  int const tables = (4 * n * (planners + 2) + 127) / 128 * 128;
  return tables > planners * row_shared ? tables : planners * row_shared;
}
inline std::size_t high_throughput_dispatch_shared(HighThroughputShape const& s) {
  int const warps = high_throughput_dispatch_warps(s);
  int const row = high_throughput_row_shared(s.hidden, s.fp8);
  int const n = s.num_experts + s.ranks;
  int const planners = high_throughput_planners(n, warps);
  return static_cast<std::size_t>(high_throughput_planned_shared(n, planners, row) + (warps - planners) * row);
}

template <bool kFp8>
__global__ void __launch_bounds__(32 * kHighThroughputWarps, 1) high_throughput_dispatch(HighThroughputDispatch const __grid_constant__ a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ std::uint64_t loaded[kHighThroughputWarps];
  __shared__ std::uint64_t places_known;
  __shared__ HighThroughputBlock state;
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

  // Until the previous kernel is over, only what it cannot touch: the shared memory of this block.
  int const planners = high_throughput_planners(N, warps);
  if (tid == 0) {
    state = {};
    ptx::barrier_init(&places_known, 32 * planners);
  }
  if (lane == 0) {
    ptx::barrier_init(&loaded[warp], 1);
    ptx::fence_shared_to_bulk();
  }
#pragma unroll 1
  for (int i = tid; i < planners * N; i += threads) {
    reinterpret_cast<int*>(shared)[i] = 0;
  }
  __syncthreads();
  begin_dependent_kernel();
  std::uint32_t const round = own<std::uint32_t>(w, a.at.sent)[block] + 1;
  int const M = a.tokens_device != nullptr ? min(*a.tokens_device, a.tokens_bound) : a.tokens_bound;
  int const t_first = first_token(M, block, blocks);
  int const t_last = first_token(M, block + 1, blocks);
  std::int32_t* const sent_rows = own<std::int32_t>(w, a.at.sent_rows[a.routing_parity]);
  std::int32_t* const sent_slots = own<std::int32_t>(w, a.at.sent_slots[a.routing_parity]);
  int const groups = (a.hidden + 127) / 128;
  int const row_shared = high_throughput_row_shared(a.hidden, kFp8);
  unsigned char* const row =
      shared +
      (warp < planners ? warp * row_shared : high_throughput_planned_shared(N, planners, row_shared) + (warp - planners) * row_shared);

  if (a.cached) {
    std::int32_t const* const summary = own<std::int32_t>(w, a.at.summary[a.routing_parity]);
    if (tid == 0) {
      state.num_rows = summary[0];
    }
#pragma unroll 1
    for (int le = block + blocks * warp; le < L; le += blocks * warps) {
      int const end = summary[2 + L + le] + summary[2 + le];
      fill_gap(a, end, (end + a.alignment - 1) / a.alignment * a.alignment);
    }
  } else if (warp < planners) {
    high_throughput_places(a, state, shared, round, M, planners);
  }
  if (warp < planners) {
    ptx::arrive(&places_known);
  }

  // The first token of a warp is fixed; if some block has more tokens than warps, the others go by ticket.
  HighThroughputTickets tickets(own<std::uint64_t>(w, a.at.tickets), round, M);
  std::uint64_t ticket = 0;
  bool const shares = M > blocks * warps;
  int t = t_first + warp;
  bool placed = a.cached || warp < planners || t >= t_last;
  if (placed) {
    ptx::barrier_wait(&places_known, 0);
    if (tid == 0 && shares) {
      tickets.open_range(t_first + warps);
    }
    ptx::fence_shared_to_bulk();  // the rows take the place of the tables
  }
  bool sends = !placed || (state.failed == 0 && state.overflown == 0);
  if (sends) {
    bool const wide = groups % 4 == 0;
    std::uint32_t phase = 0;
#pragma unroll 1
    for (bool first = t < t_last;; first = false) {
      if (!first) {
        t = shares ? tickets.take(ticket) : -1;
        if (t < 0) {
          break;
        }
      }
      // Each lane serves a rank, and which one comes first changes from rank to rank and from token to token.
      int to_rank = lane + (me + t) % R;
      to_rank = to_rank >= R ? to_rank - R : to_rank;
      int to_row = -1;
      int slot = -1;
      unsigned ranks = 0;
      auto look_up = [&] {
        to_row = lane < R ? sent_rows[t * R + to_rank] : -1;
        slot = a.lists && lane < K ? sent_slots[t * K + lane] : -1;
        ranks = __ballot_sync(0xffffffffU, to_row >= 0);
      };
      if (placed) {
        look_up();
      }
      int const e = lane < K ? expert_of(a.ids[t * K + lane], a.expert_place, a.num_ids) : -1;
      float const weight = lane < K ? a.weights[t * K + lane] : 0.0F;
      if (placed && ranks == 0) {
        ticket = shares ? tickets.ask() : 0;
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
            ptx::bulk_wait_read();  // the row that this warp sent before has left shared memory; the loads above did not wait for it
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
        ptx::fence_shared_to_bulk();
        __syncwarp();
      } else {
        ptx::bulk_wait_read();
        __syncwarp();
        if (lane == 0) {
          ptx::barrier_expect(&loaded[warp], 2 * a.hidden);
          ptx::bulk_load(row, x, 2 * a.hidden, &loaded[warp]);
        }
        __syncwarp();
        ptx::barrier_wait(&loaded[warp], phase);
        phase ^= 1;
      }
      if (!placed) {
        ptx::barrier_wait(&places_known, 0);
        placed = true;
        if (state.failed != 0 || state.overflown != 0) {
          break;
        }
        look_up();
      }
      char* const to = to_row < 0 ? nullptr : w.peer[to_rank] + a.at.rows[a.parity] + static_cast<std::size_t>(to_row) * a.at.row_bytes;
#pragma unroll 1
      for (int offset = 0; offset < a.at.row_bytes; offset += a.piece_bytes) {
        if (to_row >= 0) {
          ptx::bulk_store(to + offset, row + offset, min(a.piece_bytes, a.at.row_bytes - offset));
        }
        __syncwarp();
      }
      if (to_row >= 0) {
        if (kFp8 && wide) {
          ptx::bulk_store(w.peer[to_rank] + a.at.scales[a.parity] + static_cast<std::size_t>(to_row) * a.at.scale_stride * 4,
                          row + a.hidden, groups * 4);
        }
        ptx::bulk_commit();
      }
      ticket = shares ? tickets.ask() : 0;
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
    sends = state.failed == 0 && state.overflown == 0;
  }
  if (sends) {
    ptx::bulk_wait();
    ptx::fence_bulk();
    __syncthreads();
    if (tid < R) {
      if (a.refused != 0 && block == 0) {
        refuse(w, tid, round, a.refused);
      }
      publish(at<std::uint32_t>(w, tid, a.at.arrive) + me * kMaxExchangeBlocks + block, round);
    }
    // What no sender writes: ids of the rows past the last one.
#pragma unroll 1
    for (int r = state.num_rows + block * warps + warp; r < a.capacity; r += blocks * warps) {
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
  } else if (state.overflown != 0) {
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
