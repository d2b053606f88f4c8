// SPDX-License-Identifier: Apache-2.0
// quantization/fp8_per_token.hpp: e4m3 with a scale per token of activations and per output channel of weights.
#pragma once

#include <cstdint>

#include "moe/quantization/format/block_weights.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::quantization {

/// Fp8Codec with an upper bound on amax, so that an outlier saturates instead of reducing the resolution of its row.
template <ScaleFloor Floor, ScaleFormat Format>
struct BoundedFp8Codec : Fp8Codec<Floor, Format> {
  float amax_upper_bound = bits_float(0x7F7FFFFFU);

  MOE_HD typename Fp8Codec<Floor, Format>::Scale scale(std::uint32_t amax) const {
    bool const cut = amax < kInfBits && bits_float(amax) > amax_upper_bound;
    return Fp8Codec<Floor, Format>::scale(cut ? float_bits(amax_upper_bound) : amax);
  }
};

/// ScaleFloor::min_scale is the floor 1 / (448 · 512) of serving stacks' dynamic cast; the default is that of the offline rule.
template <ScaleFloor Floor = ScaleFloor::amax_1e10, ScaleFormat Format = ScaleFormat::f32>
struct Fp8PerToken : QuantizedRows<BoundedFp8Codec<Floor, Format>, 0>,
                     BlockWeights<Fp8Codec<ScaleFloor::amax_1e10, Format>, 1, 0>,
                     ShapeMultiple<1> {
  static constexpr char const* kName = Format == ScaleFormat::f32 ? "fp8_per_token" : "fp8_per_token_ue8m0";

  /// amax_upper_bound: > 0; larger values saturate.
  struct Params {
    float amax_upper_bound = bits_float(0x7F7FFFFFU);
  };
  Fp8PerToken() = default;
  MOE_HD constexpr explicit Fp8PerToken(Params p) { this->act.amax_upper_bound = p.amax_upper_bound; }
};

}  // namespace moe::quantization
