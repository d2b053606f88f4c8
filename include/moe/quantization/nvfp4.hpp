// SPDX-License-Identifier: Apache-2.0
// quantization/nvfp4.hpp: e2m1 with an e4m3 scale for 16 consecutive elements and a float32 scale for the tensor.
#pragma once

#include <cstdint>

#include "moe/quantization/format/block_weights.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::quantization {

/// Weight half of nvfp4. An expert's scales are its block scales [rows, ⌈cols / 16⌉], linear, then padding to a multiple of 4 bytes and the
/// expert's global scale as 4 little-endian bytes, so that one array carries both levels.
struct Nvfp4Weights {
  using WeightCodec = Nvfp4Codec;
  static constexpr ScaleGranularity kWeightGranularity = ScaleGranularity::group;
  static constexpr DType kWeightDType = WeightCodec::kCodeDType;
  static constexpr int kWeightGroupRows = 1;
  static constexpr int kWeightGroupCols = 16;
  static constexpr int kWeightPack = 2;
  template <class Act>
  using WeightCode = std::uint8_t;
  using WeightScale = std::uint8_t;

  MOE_HD static constexpr std::int64_t weight_code_cols(std::int64_t cols) { return (cols + 1) / 2; }
  MOE_HD static constexpr std::int64_t weight_scale_cols(std::int64_t cols) { return (cols + 15) / 16; }
  /// Where the global scale begins.
  MOE_HD static constexpr std::int64_t weight_global_offset(std::int64_t rows, std::int64_t cols) {
    return (rows * weight_scale_cols(cols) + 3) / 4 * 4;
  }
  MOE_HD static constexpr std::int64_t weight_scale_count(std::int64_t rows, std::int64_t cols) {
    return weight_global_offset(rows, cols) + 4;
  }
  /// The global scale (it multiplies) of an expert's matrix.
  MOE_HD static float weight_global(std::uint8_t const* scales, std::int64_t rows, std::int64_t cols) {
    std::uint8_t const* const at = scales + weight_global_offset(rows, cols);
    return bits_float(at[0] | (static_cast<std::uint32_t>(at[1]) << 8) | (static_cast<std::uint32_t>(at[2]) << 16) |
                      (static_cast<std::uint32_t>(at[3]) << 24));
  }
  MOE_HD static void set_weight_global(std::uint8_t* scales, std::int64_t rows, std::int64_t cols, float global) {
    std::uint8_t* const at = scales + weight_global_offset(rows, cols);
    for (int i = 0; i < 4; ++i) at[i] = static_cast<std::uint8_t>(float_bits(global) >> (8 * i));
  }

  /// The global scale is that of this matrix: largest finite magnitude / (448 · 6).
  template <class Act>
  void quantize_weight(float const* w, std::int64_t rows, std::int64_t cols, std::uint8_t* codes, std::uint8_t* scales) const {
    std::uint32_t amax = 0;
    for (std::int64_t i = 0; i < rows * cols; ++i) amax = std::max(amax, Int8Codec::magnitude(w[i]));
    for (std::int64_t i = rows * weight_scale_cols(cols); i < weight_global_offset(rows, cols); ++i) scales[i] = 0;
    WeightCodec const codec{WeightCodec::global_from_amax(amax)};
    set_weight_global(scales, rows, cols, codec.global_scale);
    detail::quantize_blocks(codec, w, rows, cols, 1, 16, codes, scales);
  }
  template <class Act>
  MOE_HD void dequantize_weight_row(std::uint8_t const* codes, std::uint8_t const* scales, std::int64_t rows, std::int64_t cols,
                                    std::int64_t row, float* out) const {
    detail::dequantize_block_row(WeightCodec{weight_global(scales, rows, cols)}, codes + row * weight_code_cols(cols),
                                 scales + row * weight_scale_cols(cols), cols, 16, out);
  }
};

/// w4a4. global_scale of the activations is the checkpoint's input_scale (it multiplies), equal on all ranks; 1 where there is none.
struct Nvfp4 : QuantizedRows<Nvfp4Codec, 16>, Nvfp4Weights, ShapeMultiple<16> {
  static constexpr char const* kName = "nvfp4";

  struct Params {
    float global_scale = 1.0F;
  };
  Nvfp4() = default;
  MOE_HD constexpr explicit Nvfp4(Params p) { act.global_scale = p.global_scale; }
};

/// nvfp4 weights, activations as they are.
struct Nvfp4W4A16 : UnquantizedRows, Nvfp4Weights, ShapeMultiple<16> {
  static constexpr char const* kName = "nvfp4_w4a16";
};

}  // namespace moe::quantization
