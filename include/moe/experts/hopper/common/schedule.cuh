// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/schedule.cuh: the work list of one layer, made on the device from the rows of each expert.
//
// A token tile is up to `tile_rows` consecutive rows (sorted by expert) of one expert. Phase 0 is GEMM1, phase 1 is GEMM2; a unit is
// (phase, token tile, weight tile of 256 rows, part of K). CTAs take units in order from one counter, and all units of phase 0 come first.
// So a unit of phase 1 that waits for rows of phase 0 waits only for units that some CTA has already started.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/common/split_model.hpp"
#include "moe/experts/hopper/common/wait.cuh"

namespace moe::hopper {

/// What a token tile (a group of as many tiles as the cluster has CTAs) needs to know about its expert.
struct alignas(16) TokenTile {
  int expert;
  int expert_row;     ///< sorted position of the expert's first row
  int expert_rows;    ///< rows of the expert
  int first_tile;     ///< the expert's first entry in the whole list
  int tiles;          ///< entries of the expert
  int rows_per_tile;  ///< rows of each of its tiles except the last
  int pad[2];
};
static_assert(sizeof(TokenTile) == 32);

/// The slot of a sorted row, and its router weight. The row of x is slot / topk.
struct alignas(8) SortedRow {
  std::int32_t slot;
  float weight;
};

/// The plan of one call.
struct alignas(16) Control {
  int token_tiles;  ///< total number of entries
  int rows;         ///< valid slots
  int missing;      ///< slots of valid tokens that no local expert computes
  int tokens;       ///< blocks of columns: valid tokens; set by the layer kernel in its own copy
  int splits[2];    ///< parts of K in each phase
  int units[2];     ///< units of each phase
};
static_assert(sizeof(Control) == 32);

/// One unit, decoded for one CTA.
struct alignas(16) Unit {
  int phase;  ///< 0, 1; 2 with blocks of columns: sums of tokens; -1 ends
  int expert;
  int first_row;  ///< sorted position; of sums: the first token
  int rows;       ///< 0 to tile_rows; 0 only if a cluster has more CTAs than the expert has tiles left
  int feature;    ///< first gate (and up) row in phase 0, first output column in phase 1
  int k_begin;    ///< in steps of 128 bytes of K
  int k_count;
  int token_tile;  ///< index of the counter that tells when the tile's rows are complete; of sums: reports of GEMM2 to wait for
  int tile;        ///< entry × weight tile in this phase: index of the split-K counter; of sums: reports that complete the block
  int split;
  int splits;
  int shared;       ///< more than one token tile reads these weights
  int rows_shared;  ///< block kernel, clusters of two: both CTAs have these rows, with different weight tiles
  int loaded_rows;  ///< block kernel: rows to load, also if the CTA has no weight tile left and `rows` is 0
  int block;        ///< blocks of columns: the block, in phases 1 and 2
  int columns;      ///< of sums
};
static_assert(sizeof(Unit) == 64);

/// Sizes that turn a unit number into a unit; index 0 for phase 0, 1 for phase 1.
struct UnitSpace {
  int weight_tiles[2];
  int k_steps[2];
  int raster;
  int gate_features;  ///< features of a weight tile in phase 0: kGateFeatures, or kOutputFeatures without gates
};

/// Ints behind the counter that units are drawn from: for each block of columns, reports of GEMM2, then reports of sums. The aligning
/// kernel clears them, like the other counters of a call: the layer kernel that counted in them before has ended by then.
inline constexpr int kColumnCounters = 64;

inline constexpr int kGateFeatures = 128;    ///< features of a weight tile in phase 0: 128 gate and 128 up rows
inline constexpr int kOutputFeatures = 256;  ///< in phase 1

/// Unit `number` for CTA `rank` of a cluster of `cluster`: the CTAs of a cluster share weights and take consecutive token tiles.
__device__ inline Unit decode_unit(UnitSpace const& space, Control const& control, TokenTile const* tiles, int number, int cluster,
                                   int rank) {
  Unit unit{};
  int const phase = number < control.units[0] ? 0 : 1;
  int const local = phase == 0 ? number : number - control.units[0];
  if (phase == 1 && local >= control.units[1]) {
    unit.phase = -1;
    return unit;
  }
  int const splits = phase == 0 ? control.splits[0] : control.splits[1];
  int const weight_tiles = phase == 0 ? space.weight_tiles[0] : space.weight_tiles[1];
  int const k_steps = phase == 0 ? space.k_steps[0] : space.k_steps[1];
  unit.phase = phase;
  unit.splits = splits;
  unit.tile = splits == 1 ? local : local / splits;
  unit.split = local - unit.tile * splits;
  TokenTile const entry = tiles[unit.tile / weight_tiles];
  int const rest = unit.tile - entry.first_tile * weight_tiles;
  int const group = entry.tiles <= space.raster ? 0 : rest / (space.raster * weight_tiles);
  int const in_group = min(space.raster, entry.tiles - group * space.raster);
  int const inside = rest - group * space.raster * weight_tiles;
  int const weight_tile = inside / in_group;
  int const index = group * space.raster + inside - weight_tile * in_group;
  unit.expert = entry.expert;
  int const before = (index * cluster + rank) * entry.rows_per_tile;
  unit.token_tile = (entry.first_tile + index) * cluster + rank;
  unit.first_row = entry.expert_row + before;
  unit.rows = max(0, min(entry.rows_per_tile, entry.expert_rows - before));
  unit.shared = entry.tiles * cluster > 1 ? 1 : 0;
  unit.feature = weight_tile * (phase == 0 ? space.gate_features : kOutputFeatures);
  unit.k_begin = splits == 1 ? 0 : unit.split * k_steps / splits;
  unit.k_count = (splits == 1 ? k_steps : (unit.split + 1) * k_steps / splits) - unit.k_begin;
  return unit;
}

/// Parts of K for one phase, tried by the 32 lanes of one warp; all lanes return the cheapest choice, the smallest of equals.
__device__ inline int choose_splits(SplitProblem const& p) {
  int const lane = thread_index() & 31;
  unsigned cost = 0xFFFFFFFFu;
  if (may_split(p, lane + 1)) cost = (static_cast<unsigned>(split_cost(p, lane + 1) * 256.0F) << 5) | static_cast<unsigned>(lane);
  return static_cast<int>(__reduce_min_sync(0xFFFFFFFFu, cost) & 31u) + 1;
}

/// The inputs of planning and its output `tiles`. Planning does not touch the counters.
struct PlanArgs {
  int tile_rows;
  int row_step;  ///< an expert's rows are divided evenly among its tiles, in multiples of this
  int cluster;   ///< CTAs per cluster of the layer kernel: token tiles come in groups of this size
  int workers;   ///< clusters
  int max_splits;
  int max_units;  ///< split counters of one phase
  UnitSpace space;
  TokenTile* tiles;
};

namespace detail {

/// Exclusive sum over the CTA's threads; `scratch` holds 32 ints.
template <int Threads>
__device__ inline int exclusive_sum(int value, int* scratch, int* total) {
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const warp = static_cast<int>(threadIdx.x) >> 5;
  int sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    int const other = __shfl_up_sync(0xFFFFFFFFu, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  int const warp_sum = lane < Threads / 32 ? scratch[lane] : 0;
  int const before = __reduce_add_sync(0xFFFFFFFFu, lane < warp ? static_cast<unsigned>(warp_sum) : 0u);
  *total = static_cast<int>(__reduce_add_sync(0xFFFFFFFFu, static_cast<unsigned>(warp_sum)));
  __syncthreads();
  return before + sum - value;
}

/// Computes splits and units of both phases; called by whole warps.
__device__ inline void plan_units(PlanArgs const& a, Control& control) {
  int const rows = (control.rows + control.token_tiles - 1) / max(1, control.token_tiles);  // per tile
  int before = 0;
#pragma unroll
  for (int phase = 0; phase < 2; ++phase) {
    int const count = control.token_tiles * a.space.weight_tiles[phase];
    control.splits[phase] = choose_splits({count, rows, a.space.k_steps[phase], a.workers, a.max_splits, a.max_units, before});
    control.units[phase] = count * control.splits[phase];
    before = a.space.k_steps[phase] / control.splits[phase];
  }
}

/// Thread e passes the rows of expert e (zero past the last expert). Every thread returns the plan; `first_row` is its expert's first row.
template <int Threads>
__device__ inline Control plan_tiles(PlanArgs const& a, int rows, int slots, bool write, int* scratch, int& first_row) {
  Control control{};
  int const expert = static_cast<int>(threadIdx.x);
  first_row = exclusive_sum<Threads>(rows, scratch, &control.rows);
  int const groups = (rows + a.tile_rows * a.cluster - 1) / (a.tile_rows * a.cluster);
  int const first_tile = exclusive_sum<Threads>(groups, scratch, &control.token_tiles);
  if (write && groups > 0) {
    int const tiles = groups * a.cluster;
    int const per_tile = ((rows + tiles - 1) / tiles + a.row_step - 1) / a.row_step * a.row_step;
    for (int t = 0; t < groups; ++t) a.tiles[first_tile + t] = TokenTile{expert, first_row, rows, first_tile, groups, per_tile, {0, 0}};
  }
  control.missing = slots - control.rows;
  plan_units(a, control);
  return control;
}

}  // namespace detail

}  // namespace moe::hopper
