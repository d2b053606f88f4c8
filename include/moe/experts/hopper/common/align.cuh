// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/align.cuh: one cluster of CTAs sorts the slots by expert (stable), cuts the rows into tiles and plans the work
// list.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/common/align_args.cuh"
#include "moe/experts/hopper/common/arriving_rows.cuh"
#include "moe/experts/hopper/common/column_order.hpp"
#include "moe/experts/hopper/common/quantize_rows.cuh"
#include "moe/experts/hopper/common/schedule.cuh"
#include "moe/experts/hopper/common/slots.cuh"
#include "moe/experts/hopper/common/wait.cuh"

namespace moe::hopper {

inline constexpr int kAlignThreads = 1024;
inline constexpr int kAlignWarps = kAlignThreads / 32;

/// Dynamic shared memory of the aligning kernel.
constexpr int align_smem_bytes(int num_experts) { return (kAlignWarps + 2) * num_experts * 4 + 256; }

namespace detail {

inline constexpr int kAlignBatch = 4;  ///< slots that a lane reads at a time

/// The slots of one warp of a sorting CTA, in order: warps of all CTAs have consecutive parts.
struct SlotRange {
  int begin;
  int end;
};

/// Counts this warp's slots of each expert into its histogram.
__device__ inline void count_slots(AlignArgs const& a, SlotRange own, int* histogram) {
  int const lane = static_cast<int>(threadIdx.x) & 31;
  for (int base = own.begin; base < own.end; base += 32 * kAlignBatch) {
    int id[kAlignBatch];
#pragma unroll
    for (int i = 0; i < kAlignBatch; ++i) {
      int const slot = base + 32 * i + lane;
      id[i] = slot < own.end ? slot_value(a.ids, slot, a.topk, a.id_gap) : -1;
    }
#pragma unroll
    for (int i = 0; i < kAlignBatch; ++i) {
      if (static_cast<unsigned>(id[i]) < static_cast<unsigned>(a.num_experts)) atomicAdd(&histogram[id[i]], 1);
    }
  }
}

/// Thread e owns expert e (E is at most 1024). Returns its rows in this CTA; each warp's histogram becomes the number of rows in earlier
/// warps.
__device__ inline int rows_in_block(AlignArgs const& a, int* histogram, int* totals) {
  int const thread = static_cast<int>(threadIdx.x);
  int rows = 0;
  if (thread < a.num_experts) {
    if (a.counts != nullptr) {
      rows = min(max(a.counts[thread], 0), a.capacity);
    } else {
#pragma unroll 8
      for (int w = 0; w < kAlignWarps; ++w) {
        int const count = histogram[w * a.num_experts + thread];
        histogram[w * a.num_experts + thread] = rows;
        rows += count;
      }
      totals[thread] = rows;
    }
  }
  return rows;
}

/// Clears the counters of the layer kernel: the second CTA those of the tiles, the next two those of each phase's parts of K, the fifth
/// those of copied rows, the sixth those of blocks of columns.
__device__ inline void clear_counters(AlignArgs const& a, Control const& control, int rank) {
  int const thread = static_cast<int>(threadIdx.x);
  if (rank == 1) {
    for (int i = thread; i < control.token_tiles * a.plan.cluster; i += kAlignThreads) a.counters[i] = 0;
  }
  if (rank >= 2 && rank < 4) {
    int const phase = rank - 2;
    int const splits = phase == 0 ? control.splits[0] : control.splits[1];
    if (splits > 1) {
      int const used = 2 * (phase == 0 ? control.units[0] : control.units[1]) / splits;
      for (int i = thread; i < used; i += kAlignThreads) a.counters[a.max_tiles + phase * a.plan.max_units + i] = 0;
    }
  }
  if (rank == 4 && a.copied != nullptr) {
    for (int i = thread; i < control.token_tiles; i += kAlignThreads) a.copied[i] = 0;
  }
  if (rank == 5 && thread < 2 * kMostColumnBlocks) a.next_unit[kColumnCounters + thread] = 0;
}

/// Batched format: writes the sorted rows of each expert, in the order of its block.
template <int Cluster>
__device__ inline void position_batches(AlignArgs const& a, int const* row_begin, int rank) {
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const warp = static_cast<int>(threadIdx.x) >> 5;
  for (int expert = rank * kAlignWarps + warp; expert < a.num_experts; expert += Cluster * kAlignWarps) {
    int const base = row_begin[expert];
    int const count = min(max(a.counts[expert], 0), a.capacity);
    for (int r = lane; r < count; r += 32) {
      a.sorted_rows[base + r] = SortedRow{expert * a.capacity + r, 1.0F};
    }
  }
}

/// Writes this warp's slots to their row positions, in order: after those of earlier CTAs (row_begin) and of earlier warps (histogram,
/// which advances).
__device__ inline void position_slots(AlignArgs const& a, SlotRange own, int const* row_begin, int* histogram) {
  int const lane = static_cast<int>(threadIdx.x) & 31;
  for (int base = own.begin; base < own.end; base += 32 * kAlignBatch) {
    int id[kAlignBatch];
    float weight[kAlignBatch];
#pragma unroll
    for (int i = 0; i < kAlignBatch; ++i) {
      int const slot = base + 32 * i + lane;
      id[i] = slot < own.end ? slot_value(a.ids, slot, a.topk, a.id_gap) : -1;
      weight[i] = slot < own.end ? slot_value(a.weights, slot, a.topk, a.weight_gap) : 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kAlignBatch; ++i) {
      int const slot = base + 32 * i + lane;
      bool const valid = static_cast<unsigned>(id[i]) < static_cast<unsigned>(a.num_experts);
      unsigned const peers = __match_any_sync(0xFFFFFFFFu, valid ? id[i] : -1);
      int const earlier = __popc(peers & ((1u << lane) - 1u));
      int const start = valid ? histogram[id[i]] : 0;
      __syncwarp();
      if (valid) {
        int const position = row_begin[id[i]] + start + earlier;
        if (earlier == 0) histogram[id[i]] = start + __popc(peers);
        a.sorted_rows[position] = SortedRow{slot, weight[i]};
        if (a.positions != nullptr) a.positions[slot] = position;
      } else if (a.positions != nullptr && slot < own.end) {
        a.positions[slot] = -1;
      }
      __syncwarp();
    }
  }
}

}  // namespace detail

/// Grid: Cluster CTAs that sort, then any number of whole clusters that quantise or copy. The latter wait for `sorted` if they need the
/// row positions of slots; the sorting CTAs wait only for each other's totals. Beside the dispatch this kernel waits for no end of another,
/// `sorted` tells the layer kernel that the plan is there, and copying CTAs wait for each expert's rows.
template <int Cluster>
__global__ void __launch_bounds__(kAlignThreads, 1) align_kernel(__grid_constant__ AlignArgs const a) {
  extern __shared__ int align_smem[];
  int const experts = a.num_experts;
  int* const scratch = align_smem;  // 64
  int* const totals = align_smem + 64;
  int* const row_begin = totals + experts;
  int* const histogram = row_begin + experts;  // [warps][E]
  int const thread = static_cast<int>(threadIdx.x);
  int const lane = thread & 31;
  int const warp = thread >> 5;
  launch_dependents();

  if (blockIdx.x >= Cluster) {
    int const worker = static_cast<int>(blockIdx.x) - Cluster;
    int const workers = static_cast<int>(gridDim.x) - Cluster;
    if (a.copied != nullptr) {
      detail::copy_arriving_rows<kAlignThreads>(a, worker, workers);
      return;
    }
    wait_for_dependencies();
    if (a.given_scales != nullptr) {
      detail::sort_codes<kAlignThreads>(a, worker, workers);
    } else {
      detail::quantize_groups<kAlignThreads>(a, worker, workers);
    }
    return;
  }

  int const rank = static_cast<int>(ptx::get_sreg_cluster_ctarank());
  for (int i = lane; i < experts; i += 32) histogram[warp * experts + i] = 0;
  if (!a.beside_dispatch) wait_for_dependencies();

  int const tokens = a.num_tokens != nullptr ? min(max(*a.num_tokens, 0), a.max_tokens) : a.max_tokens;
  int const slots = a.ids != nullptr ? tokens * a.topk : 0;
  int const chunk = ((slots + Cluster * kAlignThreads - 1) / (Cluster * kAlignThreads)) * 32;  // per warp, whole groups of 32
  int const begin = min((rank * kAlignWarps + warp) * chunk, slots);
  detail::SlotRange const own{begin, min(begin + chunk, slots)};
  int* const mine = histogram + warp * experts;
  __syncwarp();

  detail::count_slots(a, own, mine);
  __syncthreads();
  int rows = detail::rows_in_block(a, histogram, totals);
  cluster_arrive_release();
  cluster_wait();

  int before = 0;  // rows of this thread's expert in earlier CTAs
  if (thread < experts && a.counts == nullptr) {
    rows = 0;
#pragma unroll
    for (int r = 0; r < Cluster; ++r) {
      int const count = load_cluster(totals + thread, static_cast<std::uint32_t>(r));
      if (r < rank) before += count;
      rows += count;
    }
  }
  cluster_arrive_release();  // every CTA has read the others' totals when the last thread waits at the end

  int first_row = 0;
  Control const control = detail::plan_tiles<kAlignThreads>(a.plan, rows, slots, rank == 0, scratch, first_row);
  if (thread < experts) row_begin[thread] = first_row + before;
  detail::clear_counters(a, control, rank);
  if (rank == 0 && thread == 0) {
    *a.control = control;
    *a.next_unit = a.plan.workers;
  }
  __syncthreads();

  if (a.counts != nullptr) detail::position_batches<Cluster>(a, row_begin, rank);
  detail::position_slots(a, own, row_begin, mine);
  if (a.positions != nullptr || a.beside_dispatch) {
    __syncthreads();
    if (thread == 0) {
      fence_device();
      atomicAdd(a.sorted, 1);
    }
    __syncwarp();
  }
  cluster_wait();
}

}  // namespace moe::hopper
