// SPDX-License-Identifier: Apache-2.0
// quantization/format/formats.hpp: the narrow number formats, encoded and decoded bit for bit the same on host and device.
// docs/semantics/quantization.md §1.
#pragma once

#include <math.h>

#include <cstdint>
#include <cuda/std/bit>

#include "moe/core/types.hpp"

namespace moe::quantization {

inline constexpr float kE4m3Max = 448.0F;
inline constexpr float kE5m2Max = 57344.0F;
inline constexpr float kE2m1Max = 6.0F;
inline constexpr float kInt8Max = 127.0F;
inline constexpr float kInt4Max = 7.0F;

inline constexpr std::uint32_t kInfBits = 0x7F800000U;  ///< float32 infinity
inline constexpr std::uint32_t kNanBits = 0x7FC00000U;  ///< the one NaN that this library writes as a scale
inline constexpr std::uint8_t kE4m3Nan = 0x7F;          ///< the NaN of a scale group that held NaN or infinity
inline constexpr std::uint8_t kE8m0Nan = 0xFF;

/// What a float8 conversion does beyond the largest finite value.
enum class Overflow : std::uint8_t {
  saturate,  ///< ± the largest finite value; the rule of every scheme here
  ieee,      ///< NaN (e4m3, which has no infinity) or infinity (e5m2), as a plain cast does
};

MOE_HD inline std::uint32_t float_bits(float v) { return cuda::std::bit_cast<std::uint32_t>(v); }
MOE_HD inline float bits_float(std::uint32_t b) { return cuda::std::bit_cast<float>(b); }
MOE_HD inline float quiet_nan() { return bits_float(kNanBits); }
/// Bits of |v|. As integers they have the order of the magnitudes, with infinity and then NaN on top. So an integer maximum is an amax that
/// never loses a NaN and does not depend on the order.
MOE_HD inline std::uint32_t abs_bits(float v) { return float_bits(v) & 0x7FFFFFFFU; }

namespace detail {

/// float32 → float8 with `Mantissa` bits and exponent bias `Bias`, nearest even. `Max`: code of the largest finite value.
template <int Mantissa, int Bias, std::uint32_t Max>
MOE_HD inline std::uint8_t encode_float8(float v, Overflow overflow) {
  constexpr int kShift = 23 - Mantissa;
  constexpr std::uint32_t kMinNormal = static_cast<std::uint32_t>(128 - Bias) << 23;
  std::uint32_t const sign = (float_bits(v) >> 24) & 0x80U;
  std::uint32_t u = abs_bits(v);
  if (u > kInfBits) return static_cast<std::uint8_t>(sign | 0x7FU);
  if (u < kMinNormal) {
    // Adding 2^23 units of the subnormal grid makes the addition itself round to that grid.
    constexpr std::uint32_t kGrid = static_cast<std::uint32_t>(127 + 23 + 1 - Bias - Mantissa) << 23;
    u = float_bits(bits_float(u) + bits_float(kGrid)) - kGrid;
  } else {
    u += ((1U << (kShift - 1)) - 1U) + ((u >> kShift) & 1U);
    u = (u - (static_cast<std::uint32_t>(127 - Bias) << 23)) >> kShift;
    if (u > Max) u = overflow == Overflow::saturate ? Max : Max + 1U;
  }
  return static_cast<std::uint8_t>(sign | u);
}

/// Code without its sign → float32, exact: the fields, shifted into place, are the value times a power of two.
template <int Mantissa, int Bias>
MOE_HD inline float decode_magnitude(std::uint32_t code) {
  return bits_float(code << (23 - Mantissa)) * bits_float(static_cast<std::uint32_t>(254 - Bias) << 23);
}
template <int Mantissa, int Bias>
MOE_HD inline float decode_fnuz(std::uint8_t code) {
  if (code == 0x80U) return quiet_nan();
  float const magnitude = decode_magnitude<Mantissa, Bias>(code & 0x7FU);
  return (code & 0x80U) != 0 ? -magnitude : magnitude;
}

}  // namespace detail

/// float32 → e4m3 ("fn": no infinity, NaN 0x7F and 0xFF). The sign of a NaN is kept.
MOE_HD inline std::uint8_t encode_e4m3(float v, Overflow overflow = Overflow::saturate) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if (overflow == Overflow::saturate) {
    // The instruction drops the sign of a NaN and changes nothing else.
    return static_cast<std::uint8_t>(__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3) | ((float_bits(v) >> 24) & 0x80U));
  }
#endif
  return detail::encode_float8<3, 7, 0x7EU>(v, overflow);
}
/// float32 → e5m2.
MOE_HD inline std::uint8_t encode_e5m2(float v, Overflow overflow = Overflow::saturate) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  if (overflow == Overflow::saturate) {
    return static_cast<std::uint8_t>(__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E5M2) | ((float_bits(v) >> 24) & 0x80U));
  }
#endif
  return detail::encode_float8<2, 15, 0x7BU>(v, overflow);
}

MOE_HD inline float decode_e4m3(std::uint8_t code) {
  std::uint32_t const u = code & 0x7FU;
  float const magnitude = u == 0x7FU ? quiet_nan() : detail::decode_magnitude<3, 7>(u);
  return (code & 0x80U) != 0 ? -magnitude : magnitude;
}
MOE_HD inline float decode_e5m2(std::uint8_t code) {
  std::uint32_t const u = code & 0x7FU;
  float const magnitude = u >= 0x7CU ? bits_float(kInfBits | (u << 21)) : detail::decode_magnitude<2, 15>(u);
  return (code & 0x80U) != 0 ? -magnitude : magnitude;
}
/// The "fnuz" variants (max 240 and 57344, NaN 0x80). No scheme uses them; decoding exists for converters.
MOE_HD inline float decode_e4m3fnuz(std::uint8_t code) { return detail::decode_fnuz<3, 8>(code); }
MOE_HD inline float decode_e5m2fnuz(std::uint8_t code) { return detail::decode_fnuz<2, 16>(code); }

/// float32 → e2m1 (0, .5, 1, 1.5, 2, 3, 4, 6; sign in bit 3): nearest, ties to the even code, saturating. e2m1 has no NaN: NaN gives 0.
MOE_HD inline std::uint8_t encode_e2m1(float v) {
  float const a = bits_float(abs_bits(v));
  // Counting the passed thresholds needs no branch; a tie belongs to the even code above or below it.
  int const code = (a > 0.25F) + (a >= 0.75F) + (a > 1.25F) + (a >= 1.75F) + (a > 2.5F) + (a >= 3.5F) + (a > 5.0F);
  return static_cast<std::uint8_t>(static_cast<std::uint32_t>(code) | ((float_bits(v) >> 28) & 8U));
}
/// Code in bits 0–3; higher bits are ignored.
MOE_HD inline float decode_e2m1(std::uint8_t code) {
  float const magnitude = detail::decode_magnitude<1, 1>(code & 7U);
  return (code & 8U) != 0 ? -magnitude : magnitude;
}

/// 2^(b-127); 255 is NaN.
MOE_HD inline float decode_e8m0(std::uint8_t b) {
  if (b == kE8m0Nan) return quiet_nan();
  return bits_float(b == 0 ? 0x00400000U : static_cast<std::uint32_t>(b) << 23);
}

/// Nearest even, clamped to [low, high]; NaN gives 0.
MOE_HD inline int encode_integer(float v, float low, float high) {
  if (!(v == v)) return 0;
  float const clamped = v < low ? low : (v > high ? high : v);
  return static_cast<int>(::rintf(clamped));
}
/// float32 → int8: nearest even, clamped to ±127; -128 is never produced, infinity clamps, NaN gives 0.
MOE_HD inline std::int8_t encode_int8(float v) { return static_cast<std::int8_t>(encode_integer(v, -kInt8Max, kInt8Max)); }
/// float32 → int4 in [-8, 7].
MOE_HD inline std::int8_t encode_int4(float v) { return static_cast<std::int8_t>(encode_integer(v, -8.0F, kInt4Max)); }

/// Two 4-bit codes a byte: the element of even index in bits 0–3.
MOE_HD inline std::uint8_t pack_nibbles(std::uint32_t even, std::uint32_t odd) {
  return static_cast<std::uint8_t>((even & 15U) | ((odd & 15U) << 4));
}
/// Code of element `index` of a packed row.
MOE_HD inline std::uint8_t nibble(std::uint8_t const* row, std::int64_t index) {
  return static_cast<std::uint8_t>((row[index >> 1] >> ((index & 1) * 4)) & 15U);
}

}  // namespace moe::quantization
