// SPDX-License-Identifier: Apache-2.0
// quantization/fp8_block128.hpp: e4m3 with a scale for a 128 x 128 block of weights and for 128 elements of an activation row.
#pragma once

#include "moe/core/rule.hpp"
#include "moe/quantization/format/block_weights.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::rules {
MOE_RULE(Fp8BlockFits, "moe: fp8 blocks are of 128 x 128 elements. Fix: choose fp8_block128 (docs/errors.md#quantization-group)");
}

namespace moe::quantization {

/// The scheme of DeepSeek-V3's checkpoints (weight_scale_inv holds the scales, which multiply). ScaleFloor::amax_1e4 is the cast inside
/// low-latency exchanges.
template <int Block = 128, ScaleFormat Format = ScaleFormat::f32, ScaleFloor Floor = ScaleFloor::amax_1e10>
struct Fp8Block : QuantizedRows<Fp8Codec<Floor, Format>, Block>,
                  BlockWeights<Fp8Codec<ScaleFloor::amax_1e10, Format>, Block, Block>,
                  ShapeMultiple<1, Block> {
  static_assert(sizeof(MetRule<rules::Fp8BlockFits, Block == 128, Value<Block>, Value<128>>) == 1);
  static constexpr char const* kName = Format == ScaleFormat::f32 ? "fp8_block128" : "fp8_block128_ue8m0";
};

}  // namespace moe::quantization
