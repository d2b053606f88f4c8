// SPDX-License-Identifier: Apache-2.0
// quantization/format/tiles.hpp: the weight half of a scheme: an expert's [rows, cols] matrix ↔ codes and scales, by scale group.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moe/core/types.hpp"
#include "moe/quantization/format/granularity.hpp"
#include "moe/quantization/format/units.hpp"

namespace moe::quantization {

namespace detail {

/// Quantises w [rows, cols] in scale groups of tile_rows × tile_cols.
template <class Unit>
void quantize_tiles(Unit const& unit, float const* w, std::int64_t rows, std::int64_t cols, std::int64_t tile_rows, std::int64_t tile_cols,
                    typename Unit::Code* codes, typename Unit::Scale* scales) {
  std::int64_t const code_cols = (cols + Unit::kPack - 1) / Unit::kPack;
  for (std::int64_t r0 = 0; r0 < rows; r0 += tile_rows) {
    std::int64_t const r1 = std::min(r0 + tile_rows, rows);
    for (std::int64_t c0 = 0; c0 < cols; c0 += tile_cols) {
      std::int64_t const c1 = std::min(c0 + tile_cols, cols);
      std::uint32_t amax = 0;
      for (std::int64_t r = r0; r < r1; ++r) {
        for (std::int64_t c = c0; c < c1; ++c) amax = std::max(amax, unit.magnitude(w[r * cols + c]));
      }
      auto const scale = unit.scale(amax);
      float const d = unit.factor(scale);
      *scales++ = scale;
      for (std::int64_t r = r0; r < r1; ++r) {
        for (std::int64_t c = c0; c < c1; ++c) store_code<Unit>(codes + r * code_cols, c, unit.encode(w[r * cols + c], d));
      }
    }
  }
}

/// One row of codes and its row of scales → out [cols].
template <class Unit>
MOE_HD void dequantize_tile_row(Unit const& unit, typename Unit::Code const* codes, typename Unit::Scale const* scales, std::int64_t cols,
                                std::int64_t tile_cols, float* out) {
  for (std::int64_t c = 0; c < cols; ++c) out[c] = unit.decode(load_code<Unit>(codes, c), unit.factor(scales[c / tile_cols]));
}

}  // namespace detail

/// Weights stay in the activation dtype.
struct UnquantizedWeights {
  static constexpr ScaleGranularity kWeightGranularity = ScaleGranularity::none;
  /// Nominal: the weights have the dtype of the activations.
  static constexpr DType kWeightDType = DType::bf16;
  static constexpr int kWeightGroupRows = 0;
  static constexpr int kWeightGroupCols = 0;
  static constexpr int kWeightPack = 1;
  template <class Act>
  using WeightCode = Act;
  using WeightScale = float;

  MOE_HD static constexpr std::int64_t weight_code_cols(std::int64_t cols) { return cols; }
  MOE_HD static constexpr std::int64_t weight_scale_count(std::int64_t, std::int64_t) { return 0; }

  /// Rounds to the activation dtype.
  template <class Act>
  void quantize_weight(float const* w, std::int64_t rows, std::int64_t cols, Act* codes, float*) const {
    for (std::int64_t i = 0; i < rows * cols; ++i) codes[i] = from_float<Act>(w[i]);
  }
  template <class Act>
  MOE_HD void dequantize_weight_row(Act const* codes, float const*, std::int64_t, std::int64_t cols, std::int64_t row, float* out) const {
    for (std::int64_t c = 0; c < cols; ++c) out[c] = to_float(codes[row * cols + c]);
  }
};

/// One scale for a scale group of GroupRows × GroupCols (0: all of that dimension): per tensor <0,0>, per channel <1,0>, group <1,g>,
/// block <b,b>. Scale groups at the edge are partial. Scales: row-major [⌈rows / GroupRows⌉, ⌈cols / GroupCols⌉]; codes: row-major, every
/// row begins at a new byte.
template <class Unit_, int GroupRows, int GroupCols>
struct TileWeights {
  using WeightUnit = Unit_;
  static constexpr ScaleGranularity kWeightGranularity = GroupRows == 0   ? ScaleGranularity::per_tensor
                                                         : GroupRows > 1  ? ScaleGranularity::block
                                                         : GroupCols == 0 ? ScaleGranularity::per_channel
                                                                          : ScaleGranularity::group;
  static constexpr DType kWeightDType = WeightUnit::kCodeDType;
  static constexpr int kWeightGroupRows = GroupRows;
  static constexpr int kWeightGroupCols = GroupCols;
  static constexpr int kWeightPack = WeightUnit::kPack;
  template <class Act>
  using WeightCode = typename WeightUnit::Code;
  using WeightScale = typename WeightUnit::Scale;
  static_assert(GroupRows != 0 || GroupCols == 0, "a scale group of all rows covers all columns");

  MOE_HD static constexpr std::int64_t tile_rows(std::int64_t rows) { return GroupRows == 0 ? rows : GroupRows; }
  MOE_HD static constexpr std::int64_t tile_cols(std::int64_t cols) { return GroupCols == 0 ? cols : GroupCols; }
  MOE_HD static constexpr std::int64_t weight_code_cols(std::int64_t cols) { return (cols + kWeightPack - 1) / kWeightPack; }
  /// Scales of a row of scale groups.
  MOE_HD static constexpr std::int64_t weight_scale_cols(std::int64_t cols) {
    return GroupCols == 0 ? 1 : (cols + GroupCols - 1) / (GroupCols == 0 ? 1 : GroupCols);
  }
  MOE_HD static constexpr std::int64_t weight_scale_count(std::int64_t rows, std::int64_t cols) {
    return (GroupRows == 0 ? 1 : (rows + GroupRows - 1) / (GroupRows == 0 ? 1 : GroupRows)) * weight_scale_cols(cols);
  }

  /// w [rows, cols] → codes [rows, weight_code_cols(cols)], scales [weight_scale_count(rows, cols)]; host, offline.
  template <class Act>
  void quantize_weight(float const* w, std::int64_t rows, std::int64_t cols, WeightCode<Act>* codes, WeightScale* scales) const {
    detail::quantize_tiles(WeightUnit{}, w, rows, cols, tile_rows(rows), tile_cols(cols), codes, scales);
  }
  /// Row `row` of the matrix, in float32.
  template <class Act>
  MOE_HD void dequantize_weight_row(WeightCode<Act> const* codes, WeightScale const* scales, std::int64_t /*rows*/, std::int64_t cols,
                                    std::int64_t row, float* out) const {
    detail::dequantize_tile_row(WeightUnit{}, codes + row * weight_code_cols(cols),
                                scales + (GroupRows == 0 ? 0 : row / (GroupRows == 0 ? 1 : GroupRows)) * weight_scale_cols(cols), cols,
                                tile_cols(cols), out);
  }
};

}  // namespace moe::quantization
