// SPDX-License-Identifier: Apache-2.0
// quantization/mxfp4_fp8.hpp: mxfp4 weights with e4m3 activations in groups of 128, for products on e4m3 tensor cores.
#pragma once

#include "moe/quantization/format/block_weights.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::quantization {

/// Activations as in fp8_group128: a float32 scale for 128 elements, of which a row's last group may have fewer.
template <MxRule WeightRule = MxRule::ocp>
struct Mxfp4Fp8 : QuantizedRows<Fp8Codec<>, 128>, BlockWeights<Mxfp4Codec<WeightRule>, 1, 32>, ShapeMultiple<32> {
  static constexpr char const* kName = "mxfp4_fp8";
};

}  // namespace moe::quantization
