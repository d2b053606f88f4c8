// SPDX-License-Identifier: Apache-2.0
// quantization/mxfp8.hpp: e4m3 with a shared power of two for 32 consecutive elements, with 8- or 16-bit activations.
#pragma once

#include "moe/quantization/format/block_weights.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::quantization {

/// Activations use the rule `ActRule`; weights are quantised offline by `WeightRule` (a checkpoint's weights come with their exponents).
template <MxRule ActRule = MxRule::ceil, MxRule WeightRule = MxRule::ceil>
struct Mxfp8 : QuantizedRows<Mxfp8Codec<ActRule>, 32>, BlockWeights<Mxfp8Codec<WeightRule>, 1, 32>, ShapeMultiple<32> {
  static constexpr char const* kName = "mxfp8";
};

/// mxfp8 weights, activations as they are.
template <MxRule WeightRule = MxRule::ceil>
struct Mxfp8W8A16 : UnquantizedRows, BlockWeights<Mxfp8Codec<WeightRule>, 1, 32>, ShapeMultiple<32> {
  static constexpr char const* kName = "mxfp8_w8a16";
};

}  // namespace moe::quantization
