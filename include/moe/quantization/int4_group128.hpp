// SPDX-License-Identifier: Apache-2.0
// quantization/int4_group128.hpp: weight-only integers (wNa16): 4 or 8 bits with a scale, and perhaps a zero point, for a group along K.
#pragma once

#include <cstdint>

#include "moe/core/rule.hpp"
#include "moe/quantization/format/block_weights.hpp"
#include "moe/quantization/format/codecs.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::rules {
MOE_RULE(WeightBitsFit, "moe: only 4 and 8 bit. Fix: choose 4 or 8 bits for weight-only integers (docs/errors.md#quantization-bits)");
MOE_RULE(WeightGroupFits,
         "moe: a weight-only group is 16, 32, 64, 128 or 256 elements or the whole row. Fix: choose one of these "
         "(docs/errors.md#quantization-group)");
}  // namespace moe::rules

namespace moe::quantization {

namespace detail {

/// "int4_group32", "int8_w8a16_per_channel", "int4_group128_zero" with zero points.
constexpr char const* wna16_name(int bits, int group, bool zero_point) {
  constexpr char const* kNames[2][2][6] = {
      {{"int4_per_channel", "int4_group16", "int4_group32", "int4_group64", "int4_group128", "int4_group256"},
       {"int4_per_channel_zero", "int4_group16_zero", "int4_group32_zero", "int4_group64_zero", "int4_group128_zero",
        "int4_group256_zero"}},
      {{"int8_w8a16_per_channel", "int8_w8a16_group16", "int8_w8a16_group32", "int8_w8a16_group64", "int8_w8a16_group128",
        "int8_w8a16_group256"},
       {"int8_w8a16_per_channel_zero", "int8_w8a16_group16_zero", "int8_w8a16_group32_zero", "int8_w8a16_group64_zero",
        "int8_w8a16_group128_zero", "int8_w8a16_group256_zero"}}};
  int const at = group == 0 ? 0 : group == 16 ? 1 : group == 32 ? 2 : group == 64 ? 3 : group == 128 ? 4 : 5;
  return kNames[bits == 8 ? 1 : 0][zero_point ? 1 : 0][at];
}

}  // namespace detail

/// Weights of `Bits` = 4 or 8 in groups of `Group` along K (0: one group per row), codes low nibble first. ZeroPoint: the codes are
/// asymmetric and every group has its zero point beside its scale; else the zero point is 8 (128).
template <int Bits, int Group, bool ZeroPoint = false>
struct IntWeights {
  static_assert(sizeof(MetRule<rules::WeightBitsFit, Bits == 4 || Bits == 8, Value<Bits>, OneOf<4, 8>>) == 1);
  static_assert(
      sizeof(MetRule<rules::WeightGroupFits, Group == 0 || Group == 16 || Group == 32 || Group == 64 || Group == 128 || Group == 256,
                     Value<Group>, OneOf<0, 16, 32, 64, 128, 256>>) == 1);

  using WeightCodec = OffsetIntCodec<Bits>;
  static constexpr ScaleGranularity kWeightGranularity = Group == 0 ? ScaleGranularity::per_channel : ScaleGranularity::group;
  static constexpr DType kWeightDType = WeightCodec::kCodeDType;
  static constexpr int kWeightGroupRows = 1;
  static constexpr int kWeightGroupCols = Group;
  static constexpr int kWeightPack = WeightCodec::kPack;
  static constexpr int kShapeMultiple = Group == 0 ? kWeightPack : (Group < 32 ? Group : 32);
  static constexpr int kTransportMultiple = 1;
  template <class Act>
  using WeightCode = std::uint8_t;
  using WeightScale = std::conditional_t<ZeroPoint, ScaleZero, float>;

  static constexpr bool supports(std::int64_t hidden, std::int64_t intermediate) {
    auto fits = [](std::int64_t n) { return n < 0 || (n % kWeightPack == 0 && effective_group(n, Group) != 0); };
    return fits(hidden) && fits(intermediate);
  }
  MOE_HD static constexpr std::int64_t weight_code_cols(std::int64_t cols) { return (cols + kWeightPack - 1) / kWeightPack; }
  /// Scales of a row of `cols` elements; 0 if supports() does not accept them.
  MOE_HD static constexpr std::int64_t weight_scale_cols(std::int64_t cols) {
    std::int64_t const group = effective_group(cols, Group);
    return group == 0 ? 0 : cols / group;
  }
  MOE_HD static constexpr std::int64_t weight_scale_count(std::int64_t rows, std::int64_t cols) { return rows * weight_scale_cols(cols); }

  /// Symmetric, s = amax / 7 (127). With ZeroPoint the symmetric codes are written with their zero point 8 (128).
  template <class Act>
  void quantize_weight(float const* w, std::int64_t rows, std::int64_t cols, std::uint8_t* codes, WeightScale* scales) const {
    std::int64_t const group = effective_group(cols, Group);
    if constexpr (ZeroPoint) {
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t c = 0; c < cols; c += group) {
          float scale = 0;
          detail::quantize_blocks(WeightCodec{}, w + r * cols + c, 1, group, 1, group, codes + r * weight_code_cols(cols) + c / kWeightPack,
                                  &scale);
          *scales++ = {scale, static_cast<float>(WeightCodec::kZero)};
        }
      }
    } else {
      detail::quantize_blocks(WeightCodec{}, w, rows, cols, 1, group, codes, scales);
    }
  }
  template <class Act>
  MOE_HD void dequantize_weight_row(std::uint8_t const* codes, WeightScale const* scales, std::int64_t /*rows*/, std::int64_t cols,
                                    std::int64_t row, float* out) const {
    using Decoder = std::conditional_t<ZeroPoint, ZeroPointCodec<Bits>, WeightCodec>;
    detail::dequantize_block_row(Decoder{}, codes + row * weight_code_cols(cols), scales + row * weight_scale_cols(cols), cols,
                                 effective_group(cols, Group), out);
  }
};

/// IntWeights alone: activations as they are.
template <int Bits, int Group, bool ZeroPoint = false>
struct WNa16 : UnquantizedRows, IntWeights<Bits, Group, ZeroPoint> {
  static constexpr char const* kName = detail::wna16_name(Bits, Group, ZeroPoint);
};

/// int4 weights in groups of 128, the layout of most released int4 checkpoints.
using Int4Group128 = WNa16<4, 128>;
/// The same with zero points (AWQ, asymmetric GPTQ).
using Int4Group128Zero = WNa16<4, 128, true>;

}  // namespace moe::quantization
