// SPDX-License-Identifier: Apache-2.0
// quantization/none.hpp: no quantisation: activations and weights in the activation dtype.
#pragma once

#include "moe/quantization/format/block_weights.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::quantization {

/// bf16, f16 or f32 for activations and weights.
struct None : UnquantizedRows, UnquantizedWeights, ShapeMultiple<1> {
  static constexpr char const* kName = "none";
};

}  // namespace moe::quantization
