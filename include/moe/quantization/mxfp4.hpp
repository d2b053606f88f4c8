// SPDX-License-Identifier: Apache-2.0
// quantization/mxfp4.hpp: e2m1 with a shared power of two for 32 consecutive elements, with 4-, 8- or 16-bit activations.
#pragma once

#include "moe/quantization/format/block_weights.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::quantization {

/// w4a4. Weights are quantised offline by the OCP rule, which uses the whole e2m1 range at the price of a saturated top value.
template <MxRule ActRule = MxRule::ceil, MxRule WeightRule = MxRule::ocp>
struct Mxfp4 : QuantizedRows<Mxfp4Codec<ActRule>, 32>, BlockWeights<Mxfp4Codec<WeightRule>, 1, 32>, ShapeMultiple<32> {
  static constexpr char const* kName = "mxfp4";
};

/// mxfp4 weights, mxfp8 activations.
template <MxRule ActRule = MxRule::ceil, MxRule WeightRule = MxRule::ocp>
struct Mxfp4W4A8 : QuantizedRows<Mxfp8Codec<ActRule>, 32>, BlockWeights<Mxfp4Codec<WeightRule>, 1, 32>, ShapeMultiple<32> {
  static constexpr char const* kName = "mxfp4_w4a8";
};

/// mxfp4 weights, activations as they are: gpt-oss.
template <MxRule WeightRule = MxRule::ocp>
struct Mxfp4W4A16 : UnquantizedRows, BlockWeights<Mxfp4Codec<WeightRule>, 1, 32>, ShapeMultiple<32> {
  static constexpr char const* kName = "mxfp4_w4a16";
};

}  // namespace moe::quantization
