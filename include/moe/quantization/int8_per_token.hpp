// SPDX-License-Identifier: Apache-2.0
// quantization/int8_per_token.hpp: int8 with a scale per token of activations and per output channel of weights.
#pragma once

#include "moe/quantization/format/block_weights.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::quantization {

/// w8a8, symmetric, rounding to nearest even.
struct Int8PerToken : QuantizedRows<Int8Codec, 0>, BlockWeights<Int8Codec, 1, 0>, ShapeMultiple<1> {
  static constexpr char const* kName = "int8_per_token";
};

/// One activation scale for the tensor, from the checkpoint; weights per output channel.
struct Int8PerTensorStatic : StaticRows<Int8Codec>, BlockWeights<Int8Codec, 1, 0>, ShapeMultiple<1> {
  static constexpr char const* kName = "int8_per_tensor_static";

  Int8PerTensorStatic() = default;
  MOE_HD constexpr explicit Int8PerTensorStatic(Params p) { params = p; }
};

}  // namespace moe::quantization
