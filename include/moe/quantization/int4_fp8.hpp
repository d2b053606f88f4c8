// SPDX-License-Identifier: Apache-2.0
// quantization/int4_fp8.hpp: int4 weights in groups with e4m3 activations in groups of 128, for products on e4m3 tensor cores.
#pragma once

#include "moe/core/rule.hpp"
#include "moe/quantization/format/codecs.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/rows/rows.hpp"

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

/// Activations as in fp8_group128: a float32 scale for 128 elements, of which a row's last group may have fewer.
template <int Group = 128, bool ZeroPoint = false>
struct Int4Fp8 : QuantizedRows<Fp8Codec<>, 128>, IntWeights<4, Group, ZeroPoint> {
  static_assert(sizeof(MetRule<rules::WeightGroupFits, Group != 0, Value<Group>, OneOf<16, 32, 64, 128, 256>>) == 1);
  static constexpr char const* kName = detail::int4_fp8_name(Group, ZeroPoint);
};

}  // namespace moe::quantization
