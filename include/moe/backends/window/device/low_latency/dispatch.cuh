// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/dispatch.cuh: rows quantised and stored into the memory of the expert's rank, with counts and arrival
// flags. docs/semantics/exchange.md §8.1.
//
// One kernel, no host, no barrier. Every rank tells every rank how many rows it has for each expert. From these counts each sender knows
// where its rows begin in every batch (sources in rank order, tokens in token order), so rows land packed and in a fixed order, without a
// copy at the receiver. Two warps of each block compute row positions while the others quantise, so the counts travel meanwhile.
#pragma once

#include "moe/backends/window/device/low_latency/arriving.cuh"
#include "moe/backends/window/device/low_latency/dispatch_send.cuh"

namespace moe::detail {

/// All warps: counts, then rows piece by piece, then the flags (a dispatch that counts its rows: their counters). The block synchronises
/// after it has counted, before each piece is stored (the movers have filled it, the first warp knows the row positions) and before the
/// flags.
template <bool kFp8, bool kPerRank, class Args>
__device__ inline void send_rows(Args const& a, LowLatencyCall const& call, LowLatencyTables const& shared, LowLatencyFlags& flags) {
  int const tid = static_cast<int>(threadIdx.x);
  int const groups = (a.hidden + 127) / 128;
  int const row_stride = ((kFp8 ? a.hidden + 4 * groups : 2 * a.hidden) + 15) / 16 * 16;
  bool const moves = tid >= kPlanners;
  bool const plans = tid < 32;
  LowLatencyShare const own(call.pieces, a.topk);

  uint4 early[2] = {};
  load_first_piece<kFp8>(a, call, own, early);
  int const early_id = plans && tid < own.choices ? a.in.ids[own.t_first * a.topk + tid] : -1;
  count_choices(a, call, own, shared);
  __syncthreads();

  send_counts(a, call, shared);
  if (a.receive) {
    std::uint64_t const* const counts = comm::detail::own<std::uint64_t>(a.window, a.at.counts[a.parity]);
    if (comm::detail::note_count_waits(a.window, counts + a.num_experts, a.at.count_stride, call.round, a.tag)) {
      __syncthreads();
    }
  }

  int item = own.first;
#pragma unroll 1
  do {
    unsigned char* const row = shared.rows + ((item - own.first) & 1) * row_stride;
    int const t = call.pieces.token(item);
    int const from = call.pieces.first_value(item);
    int const values = item < own.last ? min(call.pieces.values, a.hidden - from) : 0;
    if (moves) {
      fill_row<kFp8>(a, t, from, values, item == own.first, early, row);
    } else if (item == own.first && plans) {
      find_positions(a, own, shared, early_id);
      if constexpr (!kPerRank) {
        if (!add_bases(a, call, own, shared) && tid == 0) {
          flags.failed = 1;
        }
      }
      find_targets<kPerRank>(a, call, own, shared);
    }
    __syncthreads();

    if (flags.failed != 0) {
      break;
    }
    int const targets = (t - own.t_first) * a.topk;
    if (moves) {
      store_row<kFp8>(row, from, values, shared.row_target + targets, a.topk);
    } else if (kFp8 && !plans) {
      store_scales(row, from, values, shared.scale_target + targets, a.topk, a.hidden % 512 == 0);
    }
  } while (++item < own.last);

  if (plans && own.first < own.last && flags.failed == 0) {
    write_small_words<kPerRank>(a, call, own, shared, flags);
  }
  __syncthreads();

  if constexpr (kCountsRows<Args>) {
    if (flags.failed == 0) {
      count_pieces(a, call, own, shared);
    }
  } else {
    publish_rows(a, call, flags);
  }
}

/// One thread per rank waits for rows: block b waits for block b of every rank, so that all rows are there when the kernel ends. Meanwhile
/// one planner warp waits for the counts of all ranks and adds them up, for this block's share of the experts.
template <class Args>
__device__ inline void receive_rows(Args const& a, LowLatencyCall const& call) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  std::uint64_t const* const counts = own<std::uint64_t>(w, a.at.counts[a.parity]);
  if (!a.send) {
    if (note_count_waits(w, counts + a.num_experts, a.at.count_stride, call.round, a.tag)) {
      __syncthreads();
    }
  }

  if (tid < w.size) {
    if (wait_round(w, own<std::uint32_t>(w, a.at.arrive) + tid * kMaxExchangeBlocks + block, call.round, comm::ExchangePhase::dispatch_rows,
                   tid) &&
        block == 0) {
      check_refusal(w, comm::ExchangePhase::dispatch_rows, tid, call.round);
    }
  } else if (tid >= 64 && tid < 64 + 32) {
#pragma unroll 1
    for (int le = block + (tid - 64) * blocks; le < a.local_experts; le += 32 * blocks) {
      int const rows = max(sum_counts(w, counts + w.rank * a.local_experts + le, a.at.count_stride, 0, w.size, call.round, a.tag), 0);
      a.expert_num_tokens[le] = rows;
      if (a.expert_totals != nullptr) {
        a.expert_totals[le] += rows;
      }
    }
  }
}

template <bool kFp8, bool kPerRank, class Args>
__device__ inline void dispatch_rows(Args const& a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ LowLatencyFlags flags;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);

  // Before the dependency wait, touch shared memory and the parameters only.
  LowLatencyTables const tables(a, shared);
  if (a.send) {
#pragma unroll 1
    for (int e = tid; e < 2 * a.num_experts; e += kLowLatencyThreads) {
      tables.before[e] = 0;
    }
  }
  if (tid == 0) {
    flags = {};
  }
  begin_dependent_kernel(a);

  LowLatencyCall call;
  call.round = own<std::uint32_t>(w, a.send ? a.at.sent : a.at.received)[block] + 1;
  call.pieces = a.pieces;
  if (a.in.tokens_device != nullptr) {
    call.pieces = LowLatencyPieces(min(*a.in.tokens_device, a.in.tokens), a.hidden, blocks, kDispatchStep);
  }
  call.masked = a.masks ? masked_ranks(w) : 0;
  __syncthreads();

  if (a.send) {
    send_rows<kFp8, kPerRank>(a, call, tables, flags);
  }
  if (a.receive) {
    if constexpr (kCountsRows<Args>) {
      receive_counts(a, call);
    } else {
      receive_rows(a, call);
    }
  }

  // A failed wait also leaves the round words consistent. Words of blocks that this launch does not have advance too.
  __syncthreads();
  if (tid == 0) {
#pragma unroll 1
    for (int b = block; b < kMaxExchangeBlocks; b += blocks) {
      if (a.send) {
        own<std::uint32_t>(w, a.at.sent)[b] = call.round;
        *own<std::uint32_t>(w, a.at.round_of[a.parity]) = call.round;
      }
      if (a.receive) {
        own<std::uint32_t>(w, a.at.received)[b] = call.round;
      }
    }
  }
}

template <bool kFp8, bool kPerRank>
__global__ void __launch_bounds__(kLowLatencyThreads, 1) low_latency_dispatch(LowLatencyDispatch const __grid_constant__ a) {
  dispatch_rows<kFp8, kPerRank>(a);
}
template <bool kFp8>
__global__ void __launch_bounds__(kLowLatencyThreads, 1) low_latency_dispatch_arriving(LowLatencyArriving const __grid_constant__ a) {
  dispatch_rows<kFp8, false>(a);
}

}  // namespace moe::detail
