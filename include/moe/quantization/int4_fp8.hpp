// SPDX-License-Identifier: Apache-2.0
// quantization/int4_fp8.hpp: int4 weights in groups with e4m3 activations in groups of 128, for products on e4m3 tensor cores.
#pragma once

#include <cstdint>

#include "moe/quantization/int4_group128.hpp"

namespace moe::quantization {

namespace detail {

/// "int4_group128_fp8", "int4_group32_zero_fp8".
constexpr char const* int4_fp8_name(int group, bool zero_point) {
  constexpr char const* kNames[2][5] = {
      {"int4_group16_fp8", "int4_group32_fp8", "int4_group64_fp8", "int4_group128_fp8", "int4_group256_fp8"},
      {"int4_group16_zero_fp8", "int4_group32_zero_fp8", "int4_group64_zero_fp8", "int4_group128_zero_fp8", "int4_group256_zero_fp8"}};
  return kNames[zero_point ? 1 : 0][group == 16 ? 0 : group == 32 ? 1 : group == 64 ? 2 : group == 128 ? 3 : 4];
}

}  // namespace detail

/// Weights of WNa16<4, Group, ZeroPoint>, activations as in fp8_group128: a float32 scale for 128 elements, of which a row's last group may
/// have fewer.
template <int Group = 128, bool ZeroPoint = false>
struct Int4Fp8 : QuantizedRows<Fp8Codec<>, 128> {
  using Weights = WNa16<4, Group, ZeroPoint>;
  static_assert(sizeof(MetRule<rules::WeightGroupFits, Group != 0, Value<Group>, OneOf<16, 32, 64, 128, 256>>) == 1);
  static constexpr char const* kName = detail::int4_fp8_name(Group, ZeroPoint);

  using WeightCodec = typename Weights::WeightCodec;
  static constexpr ScaleGranularity kWeightGranularity = Weights::kWeightGranularity;
  static constexpr DType kWeightDType = Weights::kWeightDType;
  static constexpr int kWeightGroupRows = Weights::kWeightGroupRows;
  static constexpr int kWeightGroupCols = Weights::kWeightGroupCols;
  static constexpr int kWeightPack = Weights::kWeightPack;
  static constexpr int kShapeMultiple = Weights::kShapeMultiple;
  static constexpr int kTransportMultiple = kShapeMultiple;
  template <class Act>
  using WeightCode = std::uint8_t;
  using WeightScale = typename Weights::WeightScale;

  static constexpr bool supports(std::int64_t hidden, std::int64_t intermediate) { return Weights::supports(hidden, intermediate); }
  MOE_HD static constexpr std::int64_t weight_code_cols(std::int64_t cols) { return Weights::weight_code_cols(cols); }
  MOE_HD static constexpr std::int64_t weight_scale_count(std::int64_t rows, std::int64_t cols) {
    return Weights::weight_scale_count(rows, cols);
  }
  template <class Act>
  void quantize_weight(float const* w, std::int64_t rows, std::int64_t cols, std::uint8_t* codes, WeightScale* scales) const {
    Weights{}.template quantize_weight<Act>(w, rows, cols, codes, scales);
  }
  template <class Act>
  MOE_HD void dequantize_weight_row(std::uint8_t const* codes, WeightScale const* scales, std::int64_t rows, std::int64_t cols,
                                    std::int64_t row, float* out) const {
    Weights{}.template dequantize_weight_row<Act>(codes, scales, rows, cols, row, out);
  }
};

}  // namespace moe::quantization
