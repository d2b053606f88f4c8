// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/row_batches.cuh: the counter of a token tile in a layer with one scale per row of the intermediate. It tells how far
// GEMM1 is, and then deals out the tile's rows to the warpgroups that quantise them.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/layer/layer_params.cuh"

namespace moe::hopper {

// Low bits: reports of the warpgroups that have stored their features of a unit of phase 0, plus the rows quantised so far; no row is
// quantised before the last report. High bits: batches of rows that warpgroups have taken, but for batch 0. A warpgroup takes at most one
// batch that does not exist, so the high bits stay below the rows of a tile plus the consumer warpgroups of a device, about 450.
inline constexpr int kBatchTaken = 1 << kRowReportBits;

__device__ inline int row_reports(int counter) { return counter & (kBatchTaken - 1); }
/// The first batch that no warpgroup has. Batch 0 belongs to the one whose report is the last: it begins without another access.
__device__ inline int next_batch(int counter) { return 1 + (counter >> kRowReportBits); }

/// Reports after which every row of a token tile is stored.
__device__ inline int stored_reports(LayerParams const& p) { return 2 * p.align.plan.space.weight_tiles[0]; }

/// Spins until a tile's counter has that many reports and quantised rows; returns the counter.
__device__ inline int wait_reports(int const* counter, int target) {
  int value = load_acquire_gpu(counter);
  for (std::uint32_t spin = 0; row_reports(value) < target; ++spin) {
    __nanosleep(64);
    if (spin > kSpinLimit) stop_program();
    value = load_acquire_gpu(counter);
  }
  return value;
}

/// Takes a batch of rows of the unit's tile; past the last one if none is left.
__device__ inline int take_batch(LayerParams const& p, Unit const& unit) {
  return next_batch(atomicAdd(p.align.counters + unit.token_tile, kBatchTaken));
}

}  // namespace moe::hopper
