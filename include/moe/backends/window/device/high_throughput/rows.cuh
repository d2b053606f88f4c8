// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/rows.cuh: the rows of a dispatch whose experts start before they have come: the second kernel of
// an arriving dispatch. docs/semantics/exchange.md §7.
#pragma once

#include "moe/backends/window/device/high_throughput/dispatch.cuh"

namespace moe::detail {

inline constexpr int kArrivalBins = 256;  ///< of local experts, in which a block orders its tokens

/// What the warps of a block of high_throughput_rows share.
struct HighThroughputOrder {
  int first[kArrivalBins];  ///< entries before each bin; advances as tokens get their positions
  int taken;                ///< tokens of the block that warps have taken
};

/// The bin of the first local expert of token t at any rank. The experts multiply local experts in ascending order.
__device__ inline int arrival_bin(HighThroughputDispatch const& a, int t) {
  int first = a.local_experts - 1;
#pragma unroll 1
  for (int j = 0; j < a.topk; ++j) {
    int const e = expert_of(a.in.ids[t * a.topk + j], a.experts);
    first = e >= 0 ? min(first, e % a.local_experts) : first;
  }
  return first * kArrivalBins / a.local_experts;
}

/// All warps: writes tokens [t_first, t_last) into `order`, by bin.
__device__ inline void order_tokens(HighThroughputDispatch const& a, HighThroughputOrder& shared, std::int32_t* order, int t_first,
                                    int t_last) {
  int const tid = static_cast<int>(threadIdx.x);
  int const threads = static_cast<int>(blockDim.x);
  for (int i = tid; i < kArrivalBins; i += threads) {
    shared.first[i] = 0;
  }
  if (tid == 0) {
    shared.taken = 0;
  }
  __syncthreads();
  for (int t = t_first + tid; t < t_last; t += threads) {
    atomicAdd(&shared.first[arrival_bin(a, t)], 1);
  }
  __syncthreads();
  if (tid < 32) {
    int before = 0;
    for (int c = 0; c < kArrivalBins; c += 32) {
      int const count = shared.first[c + tid];
      int sum = count;
#pragma unroll
      for (int o = 1; o < 32; o <<= 1) {
        int const other = __shfl_up_sync(0xffffffffU, sum, o);
        sum += tid >= o ? other : 0;
      }
      shared.first[c + tid] = before + sum - count;
      before += __shfl_sync(0xffffffffU, sum, 31);
    }
  }
  __syncthreads();
  for (int t = t_first + tid; t < t_last; t += threads) {
    order[t_first + atomicAdd(&shared.first[arrival_bin(a, t)], 1)] = t;
  }
  __syncthreads();
}

/// One warp: stores the scales that store_row() leaves out to all ranks of a token. Returns once a fence of any lane covers them.
__device__ inline void store_remaining_scales(HighThroughputDispatch const& a, HighThroughputTargets const& to, unsigned char const* row) {
#pragma unroll 1
  for (unsigned left = to.lanes; left != 0; left &= left - 1) {
    int const from = __ffs(left) - 1;
    int const r = __shfl_sync(0xffffffffU, to.rank, from);
    store_odd_scales(a, r, static_cast<std::size_t>(__shfl_sync(0xffffffffU, to.row, from)), row);
  }
  __syncwarp();
}

/// One warp: waits until this warp's last row is complete at all its ranks, then counts it for its experts there.
__device__ inline void count_arrivals(HighThroughputDispatch const& a, HighThroughputTargets const& to, int expert) {
  comm::WindowView const& w = a.window;
  ptx::bulk_wait();
  ptx::fence_bulk();
  ptx::fence_system();
  __syncwarp();
#pragma unroll 1
  for (int j = 0; j < a.topk; ++j) {
    int const e = __shfl_sync(0xffffffffU, expert, j);
    if (e >= 0 && to.row >= 0 && to.rank == e / a.local_experts) {
      std::uint32_t* const arrived = comm::detail::at<std::uint32_t>(w, to.rank, a.at.arrived[a.parity.rows]);
      atomicAdd_system(arrived + w.rank * a.local_experts + e % a.local_experts, 1U);
    }
  }
}

/// Moves the rows, with their scales, of the dispatch that ran before it. Each block sends its range of tokens in the order in which the
/// experts need them and counts every row where it has come. Then it waits for the rows of all ranks, as a dispatch does, and so names a
/// rank that is missing. The next kernel of the stream may start when all blocks of this one run: what it waits for has a multiprocessor.
template <bool kFp8>
__global__ void __launch_bounds__(32 * kHighThroughputWarps, 1) high_throughput_rows(HighThroughputDispatch const __grid_constant__ a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ std::uint64_t loaded[kHighThroughputWarps];
  __shared__ HighThroughputOrder order;
  __shared__ HighThroughputBlock state;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const warp = tid / 32;
  int const lane = tid % 32;
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  if (lane == 0) {
    ptx::barrier_init(&loaded[warp], 1);
    ptx::fence_shared_to_bulk();
  }
  begin_dependent_kernel();
  if (tid == 0) {
    state = {a.capacity, ptx::load_relaxed_system(own<std::uint32_t>(w, comm::WindowControl::abort_word)) != 0 ? 1 : 0, 0};
  }
  std::uint32_t const round = own<std::uint32_t>(w, a.at.sent)[block] + 1;
  int const M = a.in.tokens_device != nullptr ? min(*a.in.tokens_device, a.in.tokens) : a.in.tokens;
  int const t_first = first_token(M, block, blocks);
  int const t_last = first_token(M, block + 1, blocks);
  std::int32_t* const sequence = own<std::int32_t>(w, a.at.order);
  order_tokens(a, order, sequence, t_first, t_last);  // its barriers also publish `state`

  if (state.failed == 0) {
    unsigned char* const row = shared + warp * high_throughput_row_shared(a.hidden, kFp8);
    std::int32_t const* const sent_rows = own<std::int32_t>(w, a.at.sent_rows[a.parity.routing]);
    std::int32_t const* const sent_positions = own<std::int32_t>(w, a.at.sent_positions[a.parity.routing]);
    std::uint32_t phase = 0;
#pragma unroll 1
    for (;;) {
      int i = lane == 0 ? atomicAdd(&order.taken, 1) : 0;
      i = __shfl_sync(0xffffffffU, i, 0);
      if (i >= t_last - t_first) {
        break;
      }
      int const t = sequence[t_first + i];
      HighThroughputTargets to(w, t);
      to.look_up(a, sent_rows, sent_positions, t);
      if (to.lanes == 0) {
        continue;
      }
      stage_row<kFp8>(a, t, row, &loaded[warp], phase);
      store_row<kFp8>(a, to, row);
      if constexpr (kFp8) {
        store_remaining_scales(a, to, row);
      }
      count_arrivals(a, to, lane < a.topk ? expert_of(a.in.ids[t * a.topk + lane], a.experts) : -1);
    }
    publish_and_receive(a, state, round);
  }

  __syncthreads();
  if (tid == 0) {
#pragma unroll 1
    for (int b = block; b < kMaxExchangeBlocks; b += blocks) {
      own<std::uint32_t>(w, a.at.sent)[b] = round;
    }
    ptx::fence_system();
    std::uint32_t* const moved = own<std::uint32_t>(w, a.at.moved[a.parity.rows]);
    if (atomicAdd(moved, 1U) + 1 == static_cast<std::uint32_t>(blocks)) {
      ptx::fence_system();
      atomicAdd(moved, kMoved);
    }
  }
}

}  // namespace moe::detail
