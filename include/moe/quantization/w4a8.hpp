// SPDX-License-Identifier: Apache-2.0
// quantization/w4a8.hpp: int4 weights in groups with 8-bit activations per token.
#pragma once

#include "moe/core/rule.hpp"
#include "moe/quantization/int4_group128.hpp"

namespace moe::rules {
MOE_RULE(W4A8RowsFit, "moe: W4A8 has e4m3 or int8 activations. Fix: choose Fp8Codec<> or Int8Codec (docs/errors.md#quantization-bits)");
}  // namespace moe::rules

namespace moe::quantization {

namespace detail {

/// "w4a8_fp8", "w4a8_int8"; groups other than 128 are named behind it: "w4a8_fp8_group32".
constexpr char const* w4a8_name(bool fp8, int group) {
  constexpr char const* kNames[2][6] = {
      {"w4a8_int8_per_channel", "w4a8_int8_group16", "w4a8_int8_group32", "w4a8_int8_group64", "w4a8_int8", "w4a8_int8_group256"},
      {"w4a8_fp8_per_channel", "w4a8_fp8_group16", "w4a8_fp8_group32", "w4a8_fp8_group64", "w4a8_fp8", "w4a8_fp8_group256"}};
  return kNames[fp8 ? 1 : 0][group == 0 ? 0 : group == 16 ? 1 : group == 32 ? 2 : group == 64 ? 3 : group == 128 ? 4 : 5];
}

}  // namespace detail

/// Weights of WNa16<4, Group>, activations through `Codec` (e4m3 or int8) with a scale per token.
template <class Codec, int Group = 128>
struct W4A8 : QuantizedRows<Codec, 0>, IntWeights<4, Group> {
  static_assert(sizeof(MetRule<rules::W4A8RowsFit, Codec::kCodeDType == DType::e4m3 || Codec::kCodeDType == DType::i8,
                               Value<Codec::kCodeDType>, OneOf<DType::e4m3, DType::i8>>) == 1);
  static constexpr char const* kName = detail::w4a8_name(Codec::kCodeDType == DType::e4m3, Group);
};

using W4A8Fp8 = W4A8<Fp8Codec<>>;
using W4A8Int8 = W4A8<Int8Codec>;

}  // namespace moe::quantization
