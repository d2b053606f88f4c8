// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/row_codes.cuh: the codes of a row that has one scale, sixteen bytes of its values at a time.
#pragma once

#include <cstdint>

#include "moe/core/ptx/convert.cuh"
#include "moe/experts/hopper/layer/layer_params.cuh"

namespace moe::hopper::detail {

/// The arithmetic of a row-scaled scheme on a chunk of 16 bytes.
template <Scheme S>
struct RowCodes;

/// e4m3 codes of bf16 values.
template <>
struct RowCodes<Scheme::fp8_row> {
  static constexpr int kValues = 8;  ///< in a chunk
  static constexpr int kHeld = 8;    ///< chunks that a lane holds at a time
  using Chunk = uint2;

  __device__ static float amax(uint4 const& v) {
    std::uint32_t const word[4] = {v.x, v.y, v.z, v.w};
    float amax = 0.0F;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      amax = fmaxf(amax, fmaxf(fabsf(__uint_as_float(word[i] << 16)), fabsf(__uint_as_float(word[i] & 0xFFFF0000u))));
    }
    return amax;
  }
  /// An infinite amax gives an infinite scale, under which every code becomes NaN.
  __device__ static float scale(LayerConstants const& layer, float amax) {
    if (layer.static_scale > 0.0F) return layer.static_scale;
    float const cut = amax <= 3.4028234e38F ? fminf(amax, layer.amax_bound) : amax;
    return fmaxf(cut / 448.0F, layer.scale_floor);
  }
  __device__ static Chunk codes(uint4 const& v, float scale, float inverse) {
    std::uint32_t const word[4] = {v.x, v.y, v.z, v.w};
    std::uint32_t code[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      code[i] = pack_e4m3(quotient(__uint_as_float(word[i] << 16), scale, inverse),
                          quotient(__uint_as_float(word[i] & 0xFFFF0000u), scale, inverse));
    }
    return make_uint2(code[0] | (code[1] << 16), code[2] | (code[3] << 16));
  }
};

/// int8 codes of float32 values, as quantization::Int8Codec makes them: infinity clamps and NaN becomes 0, and neither changes the scale.
template <>
struct RowCodes<Scheme::int8_row> {
  static constexpr int kValues = 4;
  static constexpr int kHeld = 16;
  using Chunk = std::uint32_t;

  __device__ static float amax(uint4 const& v) {
    std::uint32_t const word[4] = {v.x, v.y, v.z, v.w};
    std::uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      std::uint32_t const magnitude = word[i] & 0x7FFFFFFFu;
      most = max(most, magnitude < 0x7F800000u ? magnitude : 0u);
    }
    return __uint_as_float(most);
  }
  __device__ static float scale(LayerConstants const& layer, float amax) {
    return layer.static_scale > 0.0F ? layer.static_scale : fmaxf(amax / 127.0F, layer.scale_floor);
  }
  __device__ static Chunk codes(uint4 const& v, float scale, float inverse) {
    // A value at or beyond the limit has the code ±127. Without the cut, quotient() of infinity would be NaN.
    float const limit = fminf(127.0F * scale, 3.4028235e38F);
    std::uint32_t const word[4] = {v.x, v.y, v.z, v.w};
    std::uint32_t code[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float const x = __uint_as_float(word[i]);
      float const cut = fminf(fmaxf(x, -limit), limit);  // of NaN: -limit
      code[i] = static_cast<std::uint32_t>(__float2int_rn(x == x ? quotient(cut, scale, inverse) : 0.0F));
    }
    return __byte_perm(__byte_perm(code[0], code[1], 0x0040), __byte_perm(code[2], code[3], 0x0040), 0x5410);
  }
};

}  // namespace moe::hopper::detail
