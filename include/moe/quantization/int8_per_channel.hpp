// SPDX-License-Identifier: Apache-2.0
// quantization/int8_per_channel.hpp: weight-only int8 with a scale per output channel (w8a16).
#pragma once

#include "moe/quantization/format/block_weights.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::quantization {

/// Activations stay as they are.
struct Int8PerChannel : UnquantizedRows, BlockWeights<Int8Codec, 1, 0>, ShapeMultiple<1> {
  static constexpr char const* kName = "int8_per_channel";
};

}  // namespace moe::quantization
