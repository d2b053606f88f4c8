// SPDX-License-Identifier: Apache-2.0
// quantization/fp8_per_channel.hpp: weight-only e4m3 with a scale per output channel (w8a16).
#pragma once

#include "moe/quantization/format/block_weights.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::quantization {

/// Activations stay as they are.
template <ScaleFormat Format = ScaleFormat::f32>
struct Fp8PerChannel : UnquantizedRows, BlockWeights<Fp8Codec<ScaleFloor::amax_1e10, Format>, 1, 0>, ShapeMultiple<1> {
  static constexpr char const* kName = Format == ScaleFormat::f32 ? "fp8_per_channel" : "fp8_per_channel_ue8m0";
};

}  // namespace moe::quantization
