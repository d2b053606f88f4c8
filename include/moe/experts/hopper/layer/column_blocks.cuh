// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/column_blocks.cuh: GEMM2 block of columns by block of columns, and the sums over the slots in the same kernel.
//
// A token needs the rows of all its experts, so in the order of experts no token is complete before the end. In the order of columns a
// block of them is complete for all tokens while the next ones are multiplied. A unit of sums waits until GEMM2 of its block is complete.
// It waits for units before it in the list. The CTA that drew one of those finishes it without waiting for a later one: no deadlock.
#pragma once

#include <cstdint>
#include <limits>

#include "moe/comm/completions.cuh"
#include "moe/experts/hopper/common/column_order.hpp"
#include "moe/experts/hopper/common/reduce.cuh"
#include "moe/experts/hopper/layer/layer_params.cuh"

namespace moe::hopper {

static_assert(kColumnStep == kOutputFeatures && kMostColumnBlocks == comm::kMaxColumnBlocks);

/// How a call is cut into blocks of columns.
struct ColumnBlocks {
  ColumnCut cut;    ///< if K is split in GEMM2, the kernel takes one block instead
  int sum_tokens;   ///< that a CTA sums in a unit
  int leaving;      ///< CTAs at the end of the grid, whole clusters, at most half, that end once the first sums are drawn, for a combine
  int* multiplied;  ///< [kMostColumnBlocks] reports of GEMM2, zero on entry, see kColumnCounters
  int* summed;      ///< likewise of sums
  comm::Completions completions;  ///< words of the same blocks, to be written; blocks 0: none
};

/// Parameters of a kernel with blocks of columns. Kernels without them take `Base`, and their code is as if there were none.
template <class Base>
struct WithColumns : Base {
  ColumnBlocks columns;
};
template <class Params>
inline constexpr bool kColumnBlocks = false;
template <class Base>
inline constexpr bool kColumnBlocks<WithColumns<Base>> = true;

/// The kernel's copy of the plan.
template <class Params>
__device__ inline Control control_of(Params const& params, AlignArgs const& a) {
  Control control = *a.control;
  if constexpr (kColumnBlocks<Params>) control.tokens = a.num_tokens != nullptr ? min(max(*a.num_tokens, 0), a.max_tokens) : a.max_tokens;
  return control;
}

/// The units of a cluster of `Cluster` CTAs. Pairs: clusters take pairs of weight tiles, as decode_block_unit() does. Reports: of each CTA
/// for a unit.
template <int Cluster, bool Pairs, int Reports>
struct ColumnSchedule {
  ColumnUnits units;
  ColumnCut cut;  ///< one block if K is split
  int tiles;      ///< weight tiles of a block but the last
  int last_tiles;

  __device__ ColumnSchedule(ColumnBlocks const& c, Control const& control, int hidden) : cut(c.cut) {
    if (control.splits[1] != 1) cut = {1, hidden};
    tiles = cut.columns / kColumnStep;
    last_tiles = (hidden + kColumnStep - 1) / kColumnStep - (cut.blocks - 1) * tiles;
    int const per_tile = control.token_tiles * control.splits[1];
    int const at_once = c.sum_tokens * Cluster;
    units = {cut.blocks, per_tile * entries(tiles), per_tile * entries(last_tiles), (control.tokens + at_once - 1) / at_once};
  }
  /// Units of one token tile in a block of so many weight tiles.
  __device__ static int entries(int weight_tiles) { return Pairs ? (weight_tiles + 1) / 2 : weight_tiles; }

  /// Unit `number` behind GEMM1 for CTA `rank`. `products(weight_tiles, control, local)` decodes unit `local` of a GEMM2 with so many
  /// weight tiles by a plan without GEMM1.
  template <class Products>
  __device__ Unit decode(ColumnBlocks const& c, Control const& control, int hidden, int number, int rank, Products products) const {
    ColumnPlace const at = column_place(units, number);
    bool const last = at.block == cut.blocks - 1;
    int const here = last ? units.last_products : units.products;
    Unit unit{};
    if (at.phase == 1) {
      Control only = control;
      only.units[0] = 0;
      only.units[1] = here;
      unit = products(last ? last_tiles : tiles, only, at.local);
      unit.feature += at.block * cut.columns;
    } else {
      unit.phase = at.phase;
      unit.first_row = (at.local * Cluster + rank) * c.sum_tokens;
      unit.rows = max(0, min(c.sum_tokens, control.tokens - unit.first_row));
      unit.feature = at.block * cut.columns;
      unit.columns = min(cut.columns, hidden - unit.feature);
      unit.k_count = 1;  // a stage of the ring without data: without it one CTA of a cluster could be many units ahead of the other
      unit.token_tile = Reports * Cluster * (here / control.splits[1]);
      unit.tile = Reports * Cluster * units.sums;
    }
    unit.block = at.block;
    return unit;
  }
  /// The number, counted from GEMM1's first unit, from which on this CTA draws no more.
  __device__ int limit(ColumnBlocks const& c, Control const& control) const {
    bool const leaves = static_cast<int>(blockIdx.x) >= static_cast<int>(gridDim.x) - c.leaving;
    return leaves ? control.units[0] + behind_first_sums(units) : std::numeric_limits<int>::max();
  }
};

/// Draws the next number, if the unit with `number` is below `limit`; else one behind the last.
__device__ inline int draw_below(int limit, int* next_unit, int number) {
  return number < limit ? atomicAdd(next_unit, 1) : std::numeric_limits<int>::max();
}

/// A loading thread passes the stage of a unit of sums on without data.
template <class Memory, class Ring>
__device__ inline void pass_stage(Memory const& memory, Ring& ring) {
  wait_parity(memory.empty(ring.stage), ring.parity ^ 1u);
  arrive(memory.full(ring.stage));
  ring.advance();
}

/// A warpgroup's part of a unit of sums: waits for GEMM2 of the block, then sums each token's slots in order, in float32, with one
/// rounding, as reduce_kernel does. With topk 1 GEMM2 has written the rows themselves: zeros where no local expert computes the slot.
///
/// One thread acquires the reports of GEMM2, each of which released the stores of its CTA or warpgroup; the barrier hands that on to the
/// other threads, whose loads go to L2.
template <class Output>
__device__ inline void sum_columns(LayerParams const& p, ColumnBlocks const& c, Unit const& unit, int group) {
  constexpr int kTogether = 4;  // tokens, with four slots each: 16 loads under way
  int const thread = thread_index() & 127;
  if (thread == 0) wait_counter(c.multiplied + unit.block, unit.token_tile);
  group_barrier(group);
  int const topk = p.align.topk;
  int const hidden = p.align.hidden;
  auto const experts = static_cast<unsigned>(p.align.num_experts);
  SlotIds const ids(p.align.ids, p.align.id_gap);
  int const chunks = unit.columns / 8;
  int const total = unit.rows * chunks;
  for (int first = 128 * group + thread; first < total; first += 256 * kTogether) {
    long long token[kTogether];
    int column[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      int const item = min(first + 256 * i, total - 1);
      int const row = item / chunks;
      token[i] = unit.first_row + row;
      column[i] = unit.feature + 8 * (item - row * chunks);
    }
    float sum[kTogether][8] = {};
    if (topk > 1) {
      for (int j0 = 0; j0 < topk; j0 += 4) {
        bool there[kTogether][4];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          auto const slot_ids = ids.row(token[i], topk);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            there[i][j] = first + 256 * i < total && j0 + j < topk && static_cast<unsigned>(slot_ids[min(j0 + j, topk - 1)]) < experts;
          }
        }
        uint4 value[kTogether][4];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          auto const rows =
              reinterpret_cast<uint4 const*>(static_cast<Output const*>(p.rows_out) + (token[i] * topk + j0) * hidden + column[i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            value[i][j] = there[i][j] ? __ldcg(rows + static_cast<long long>(j) * (hidden / 8)) : make_uint4(0, 0, 0, 0);
          }
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) detail::add_four<Output>(value[i], sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (first + 256 * i >= total) break;
      if (topk == 1 && static_cast<unsigned>(*ids.row(token[i], 1)) < experts) continue;
      detail::store_sum<Output>(static_cast<Output*>(p.out) + token[i] * hidden + column[i], sum[i]);
    }
  }
}

/// One warp: tells all ranks that a block is complete, or that all are if the kernel has one block because K is split.
__device__ inline void tell_columns(ColumnBlocks const& c, Control const* control, int block) {
  bool const one = control->splits[1] != 1;
  int const end = one ? c.completions.blocks : block + 1;
  for (int b = one ? 0 : block; b < end; ++b) comm::detail::complete_columns(c.completions, b);
}
/// One warp: a call without tokens has no units of sums, so the grid's first CTA tells all blocks. With tokens the last report of each
/// block's sums tells it, so every block is told in every round.
__device__ inline void tell_without_tokens(ColumnBlocks const& c, Control const* control) {
  if (blockIdx.x != 0 || control->tokens > 0) return;
  for (int b = 0; b < c.completions.blocks; ++b) comm::detail::complete_columns(c.completions, b);
}

/// One warp: reports `count` units of GEMM2. The threads that stored their rows have met this warp at a barrier after the stores.
__device__ inline void report_products(ColumnBlocks const& c, int block, int count) {
  if ((thread_index() & 31) != 0) return;
  fence_device();
  atomicAdd(c.multiplied + block, count);
}
/// One warp: reports a unit of sums, likewise after a barrier with the threads that stored it. The last report of a block has acquired all
/// others, and tells all ranks that the block is complete.
__device__ inline void report_sums(ColumnBlocks const& c, Control const* control, Unit const& unit) {
  if (c.completions.blocks == 0) return;
  bool last = false;
  if ((thread_index() & 31) == 0) {
    fence_device();
    last = atomicAdd(c.summed + unit.block, 1) + 1 == unit.tile;
    fence_device();
  }
  if (__any_sync(0xFFFFFFFFu, last ? 1 : 0) == 0) return;
  __syncwarp();  // a vote orders no memory: hands on what the first lane has acquired
  tell_columns(c, control, unit.block);
}

/// A warpgroup's units of GEMM2 that it has not reported yet, all of one block. A report takes a fence of 1000 to 2000 cycles, so it makes
/// one for all of them: before a unit of another block or of sums, which could wait for it, and before it ends.
class PendingReports {
 public:
  __device__ void add(Unit const& unit) { word_ = (unit.block << 24) + (word_ & 0xFFFFFF) + 1; }
  /// All threads of the warpgroup, before the work on `next`.
  __device__ void flush(ColumnBlocks const& c, Unit const& next) {
    if (word_ == 0 || (next.phase == 1 && next.block == word_ >> 24)) return;
    if ((thread_index() & 127) < 32) report_products(c, word_ >> 24, word_ & 0xFFFFFF);
    word_ = 0;
  }

 private:
  int word_ = 0;  // block and number
};

}  // namespace moe::hopper
