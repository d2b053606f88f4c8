// SPDX-License-Identifier: Apache-2.0
// quantization/int8_group128.hpp: int8 with a scale for 128 consecutive elements of a row, activations and weights alike.
#pragma once

#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/format/tiles.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::quantization {

/// Rounds to nearest even, never truncates.
template <int Group = 128>
struct Int8Group : QuantizedRows<Int8Unit, Group>, TileWeights<Int8Unit, 1, Group>, ShapeMultiple<1, Group> {
  static_assert(Group == 128, "moe: int8 groups are of 128 elements. Fix: choose int8_group128 (docs/errors.md#quantization-group)");
  static constexpr char const* kName = "int8_group128";
};

}  // namespace moe::quantization
