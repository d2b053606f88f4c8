// SPDX-License-Identifier: Apache-2.0
// quantization/fp8_group128.hpp: e4m3 with a scale for 128 consecutive elements of a row, activations and weights alike.
#pragma once

#include "moe/core/rule.hpp"
#include "moe/quantization/format/block_weights.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::rules {
MOE_RULE(Fp8GroupFits, "moe: fp8 groups are of 128 elements. Fix: choose fp8_group128 (docs/errors.md#quantization-group)");
}

namespace moe::quantization {

/// A row's last group may be shorter; exchanges need whole groups.
template <int Group = 128, ScaleFormat Format = ScaleFormat::f32, ScaleFloor Floor = ScaleFloor::amax_1e10>
struct Fp8Group : QuantizedRows<Fp8Codec<Floor, Format>, Group>,
                  BlockWeights<Fp8Codec<ScaleFloor::amax_1e10, Format>, 1, Group>,
                  ShapeMultiple<1, Group> {
  static_assert(sizeof(MetRule<rules::Fp8GroupFits, Group == 128, Value<Group>, Value<128>>) == 1);
  static constexpr char const* kName = Format == ScaleFormat::f32 ? "fp8_group128" : "fp8_group128_ue8m0";
};

}  // namespace moe::quantization
