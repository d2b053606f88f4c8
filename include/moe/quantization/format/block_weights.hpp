// SPDX-License-Identifier: Apache-2.0
// quantization/format/block_weights.hpp: the weight half of a scheme: an expert's [rows, cols] matrix ↔ codes and scales, by scale group.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moe/core/types.hpp"
#include "moe/quantization/format/codecs.hpp"
#include "moe/quantization/format/decode_row.hpp"
#include "moe/quantization/format/granularity.hpp"

namespace moe::quantization {

namespace detail {

/// Quantises w [rows, cols] in scale groups of block_rows × block_cols.
template <class Codec>
void quantize_blocks(Codec const& codec, float const* w, std::int64_t rows, std::int64_t cols, std::int64_t block_rows,
                     std::int64_t block_cols, typename Codec::Code* codes, typename Codec::Scale* scales) {
  std::int64_t const code_cols = (cols + Codec::kPack - 1) / Codec::kPack;
  for (std::int64_t r0 = 0; r0 < rows; r0 += block_rows) {
    std::int64_t const r1 = std::min(r0 + block_rows, rows);
    for (std::int64_t c0 = 0; c0 < cols; c0 += block_cols) {
      std::int64_t const c1 = std::min(c0 + block_cols, cols);
      std::uint32_t amax = 0;
      for (std::int64_t r = r0; r < r1; ++r) {
        for (std::int64_t c = c0; c < c1; ++c) amax = std::max(amax, codec.magnitude(w[r * cols + c]));
      }
      auto const scale = codec.scale(amax);
      float const d = codec.factor(scale);
      *scales++ = scale;
      for (std::int64_t r = r0; r < r1; ++r) {
        for (std::int64_t c = c0; c < c1; ++c) store_code<Codec>(codes + r * code_cols, c, codec.encode(w[r * cols + c], d));
      }
    }
  }
}

/// One row of codes and its row of scales → out [cols].
template <class Codec>
MOE_HD void dequantize_block_row(Codec const& codec, typename Codec::Code const* codes, typename Codec::Scale const* scales,
                                 std::int64_t cols, std::int64_t block_cols, float* out) {
#if defined(__CUDA_ARCH__)
  for (std::int64_t c = 0; c < cols; ++c) out[c] = codec.decode(load_code<Codec>(codes, c), codec.factor(scales[c / block_cols]));
#else
  decode_row(codec, codes, scales, cols, block_cols, out);
#endif
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
template <class Codec_, int GroupRows, int GroupCols>
struct BlockWeights {
  using WeightCodec = Codec_;
  static constexpr ScaleGranularity kWeightGranularity = GroupRows == 0   ? ScaleGranularity::per_tensor
                                                         : GroupRows > 1  ? ScaleGranularity::block
                                                         : GroupCols == 0 ? ScaleGranularity::per_channel
                                                                          : ScaleGranularity::group;
  static constexpr DType kWeightDType = WeightCodec::kCodeDType;
  static constexpr int kWeightGroupRows = GroupRows;
  static constexpr int kWeightGroupCols = GroupCols;
  static constexpr int kWeightPack = WeightCodec::kPack;
  template <class Act>
  using WeightCode = typename WeightCodec::Code;
  using WeightScale = typename WeightCodec::Scale;
  static_assert(GroupRows != 0 || GroupCols == 0, "a scale group of all rows covers all columns");

  MOE_HD static constexpr std::int64_t block_rows(std::int64_t rows) { return GroupRows == 0 ? rows : GroupRows; }
  MOE_HD static constexpr std::int64_t block_cols(std::int64_t cols) { return GroupCols == 0 ? cols : GroupCols; }
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
    detail::quantize_blocks(WeightCodec{}, w, rows, cols, block_rows(rows), block_cols(cols), codes, scales);
  }
  /// Row `row` of the matrix, in float32.
  template <class Act>
  MOE_HD void dequantize_weight_row(WeightCode<Act> const* codes, WeightScale const* scales, std::int64_t /*rows*/, std::int64_t cols,
                                    std::int64_t row, float* out) const {
    detail::dequantize_block_row(WeightCodec{}, codes + row * weight_code_cols(cols),
                                 scales + (GroupRows == 0 ? 0 : row / (GroupRows == 0 ? 1 : GroupRows)) * weight_scale_cols(cols), cols,
                                 block_cols(cols), out);
  }
};

}  // namespace moe::quantization
