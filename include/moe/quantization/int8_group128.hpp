// SPDX-License-Identifier: Apache-2.0
// quantization/int8_group128.hpp: int8 with a scale for 128 consecutive elements of a row, activations and weights alike.
#pragma once

#include "moe/core/rule.hpp"
#include "moe/quantization/format/block_weights.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::rules {
MOE_RULE(Int8GroupFits, "moe: int8 groups are of 128 elements. Fix: choose int8_group128 (docs/errors.md#quantization-group)");
}

namespace moe::quantization {

/// Rounds to nearest even, never truncates.
template <int Group = 128>
struct Int8Group : QuantizedRows<Int8Codec, Group>, BlockWeights<Int8Codec, 1, Group>, ShapeMultiple<1, Group> {
  static_assert(sizeof(MetRule<rules::Int8GroupFits, Group == 128, Value<Group>, Value<128>>) == 1);
  static constexpr char const* kName = "int8_group128";
};

}  // namespace moe::quantization
