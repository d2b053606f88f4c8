// SPDX-License-Identifier: Apache-2.0
// experts/hopper/schedule.cuh: the work list of one layer, made on the device from the rows of each expert.
//
// A token tile is up to `tile_rows` consecutive rows (sorted by expert) of one expert. Phase 0 is GEMM1, phase 1 is GEMM2; a unit is
// (phase, token tile, weight tile of 256 rows, part of K). CTAs take units in order from one counter: all units of phase 0 come first,
// so a unit of phase 1 that waits for rows of phase 0 waits only for units that some CTA has already begun.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/ptx.cuh"

namespace moe::hopper {

/// What one token tile must know of its expert; the aligning kernel writes one entry per token tile.
struct alignas(16) TokenTile {
  int expert;
  int expert_row;     ///< sorted position of the expert's first row
  int expert_rows;    ///< rows of the expert
  int first_tile;     ///< the expert's first tile in the whole list
  int tiles;          ///< tiles of the expert
  int rows_per_tile;  ///< of all its tiles but the last
  int pad[2];
};
static_assert(sizeof(TokenTile) == 32);

/// Control block at the head of the workspace, written by the aligning kernel.
struct Control {
  int next_unit;    ///< the counter that CTAs draw from; starts at the number of CTAs, each of which begins with its own index
  int token_tiles;  ///< in all
  int splits[2];    ///< parts of K in each phase
  int units[2];     ///< units of each phase
  int rows;         ///< valid slots
  int missing;      ///< slots of tokens in range that no local expert computes
};

/// One unit, decoded.
struct alignas(16) Unit {
  int phase;  ///< 0, 1; -1 ends
  int expert;
  int first_row;  ///< sorted position
  int rows;       ///< 1 to tile_rows
  int feature;    ///< first gate (and up) row in phase 0, first output column in phase 1
  int k_begin;    ///< in steps of 128 bytes of K
  int k_count;
  int token_tile;
  int tile;  ///< token tile × weight tile in this phase: names the split-K counter
  int split;
  int splits;
  int pad;
};
static_assert(sizeof(Unit) == 48);

/// Sizes that turn a unit number into a unit; index 0 for phase 0, 1 for phase 1.
struct UnitSpace {
  int weight_tiles[2];
  int k_steps[2];
  int raster;
};

inline constexpr int kGateFeatures = 128;    ///< features of a weight tile in phase 0: 128 gate and 128 up rows
inline constexpr int kOutputFeatures = 256;  ///< in phase 1

__device__ inline Unit decode_unit(UnitSpace const& space, Control const& control, TokenTile const* tiles, int number) {
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
  unit.token_tile = entry.first_tile + index;
  unit.first_row = entry.expert_row + index * entry.rows_per_tile;
  unit.rows = min(entry.rows_per_tile, entry.expert_rows - index * entry.rows_per_tile);
  unit.feature = weight_tile * (phase == 0 ? kGateFeatures : kOutputFeatures);
  unit.k_begin = splits == 1 ? 0 : unit.split * k_steps / splits;
  unit.k_count = (splits == 1 ? k_steps : (unit.split + 1) * k_steps / splits) - unit.k_begin;
  return unit;
}

/// Parts of K for `tiles` tiles of `k_steps` steps on `workers` CTAs, tried by the 32 lanes of one warp: the least of rounds × (steps of
/// a part + 1 for its reduction), the fewest parts first. All lanes return the choice.
__device__ inline int choose_splits(int tiles, int k_steps, int workers, int max_splits, int max_units) {
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const splits = lane + 1;
  long long cost = 1LL << 40;
  bool const allowed = splits == 1 || (splits <= max_splits && splits <= k_steps && tiles < 2 * workers &&
                                       static_cast<long long>(tiles) * splits <= max_units);
  if (allowed && tiles > 0) {
    int const rounds = (tiles * splits + workers - 1) / workers;
    int const steps = (k_steps + splits - 1) / splits;
    cost = static_cast<long long>(rounds) * (steps + (splits > 1 ? 1 : 0)) * 64 + splits;
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    cost = min(cost, __shfl_xor_sync(0xFFFFFFFFu, cost, offset));
  }
  return tiles > 0 ? static_cast<int>(cost & 63) : 1;
}

}  // namespace moe::hopper
