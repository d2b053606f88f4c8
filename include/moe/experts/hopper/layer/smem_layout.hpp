// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/smem_layout.hpp: the layer kernel's shared memory, and the tiles of a set of kernels. Plain host C++, so that the
// composition rules can report a tile that does not fit before any kernel is compiled.
#pragma once

#include <algorithm>

#include "moe/experts/hopper/common/problem.hpp"

namespace moe::hopper {

inline constexpr int kWeightBytes = 32768;  ///< 256 rows of 128 bytes of K
inline constexpr int kUnitBytes = 64;
inline constexpr int kControlBytes = 32;

/// Row-scaled: bits of a token tile's counter that count reports of GEMM1 (two per weight tile) and quantised rows.
inline constexpr int kRowReportBits = 20;
/// Row-scaled: I is at most this, so that those bits suffice.
inline constexpr int kMostRowScaledColumns = 128 * ((1 << (kRowReportBits - 1)) - 128);

/// Rows that go through a warpgroup's staging buffer at a time: fewer for the largest tiles, so that one more stage of the ring fits.
constexpr int pass_rows(Scheme s, int max_rows) { return std::min(max_rows, is_fp8(s) ? 32 : max_rows > 128 ? 56 : 64); }

/// Byte offsets in dynamic shared memory, from a 1024-byte aligned base.
template <Scheme S, int Stages, int MaxRows>
struct SmemLayout {
  static constexpr int kMaxRows = MaxRows;
  static constexpr int kRowBytes = MaxRows * 128;
  static constexpr int kScaleBytes = S == Scheme::fp8_block ? 1024 : 0;  ///< [MaxRows] row scales, then at 512 two weight scales
  static constexpr int kStageBytes = kWeightBytes + (kRowBytes + 1023) / 1024 * 1024 + kScaleBytes;
  static constexpr int kStaging = Stages * kStageBytes;  ///< rows of 128 bytes, one buffer per consumer warpgroup
  static constexpr int kStagingRows = pass_rows(S, MaxRows);
  static constexpr int kStagingBytes = kStagingRows * 128;
  static constexpr int kTargets = kStaging + 2 * kStagingBytes;  ///< per warpgroup: MaxRows target rows
  static constexpr int kWeights = kTargets + 2 * MaxRows * 4;    ///< per warpgroup: MaxRows router weights
  static constexpr int kUnits = (kWeights + 2 * MaxRows * 4 + 15) / 16 * 16;
  static constexpr int kBarriers = kUnits + kUnitEntries * kUnitBytes;
  static constexpr int kFlags = kBarriers + (2 * Stages + 3 * kUnitEntries) * 8;  ///< one word per warpgroup
  static constexpr int kControl = (kFlags + 8 + 15) / 16 * 16;
  static constexpr int kNumbers = kControl + kControlBytes;          ///< unit numbers that the cluster's first CTA drew
  static constexpr int kBytes = kNumbers + kUnitEntries * 4 + 1024;  ///< with room to align the base
};

/// Ring stages of 128 bytes of K in the three kernels that a layer chooses from: for tiles of at most 16 rows, of at most 64, and of the
/// scheme's most rows. A policy takes another such struct for other tiles.
struct DefaultTiles {
  static constexpr int kSmallStages = 6;
  static constexpr int kMediumStages = 5;
  static constexpr int large_stages(Scheme s) { return is_fp8(s) ? 5 : 4; }
};

/// Shared memory of the largest of the kernels.
template <Scheme S, class Tiles>
constexpr int layer_smem_bytes() {
  return std::max({SmemLayout<S, Tiles::kSmallStages, 16>::kBytes, SmemLayout<S, Tiles::kMediumStages, 64>::kBytes,
                   SmemLayout<S, Tiles::large_stages(S), kMostRows<S>>::kBytes});
}

}  // namespace moe::hopper
