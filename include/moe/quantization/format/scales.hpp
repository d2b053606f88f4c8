// SPDX-License-Identifier: Apache-2.0
// quantization/format/scales.hpp: the scale of a scale group from its largest magnitude; logarithms are computed on the bits.
// docs/semantics/quantization.md §2–§4.
#pragma once

#include <cstdint>
#include <string_view>

#include "moe/core/rounded.hpp"
#include "moe/quantization/format/formats.hpp"

namespace moe::quantization {

/// The lower bound that keeps the scale of a tiny or all-zero scale group above zero.
enum class ScaleFloor : std::uint8_t {
  amax_1e10,  ///< amax is at least 1e-10: the rule of group, block and offline quantisation
  amax_1e4,   ///< amax is at least 1e-4: the cast inside low-latency exchanges
  min_scale,  ///< the scale itself is at least 1 / (448 · 512): the rule of serving stacks' dynamic per-token cast
};
/// How a scale is stored.
enum class ScaleFormat : std::uint8_t {
  f32,       ///< any float32
  f32_pow2,  ///< float32, rounded up to a power of two
  ue8m0,     ///< the exponent byte of that power of two
};
/// Choice of the shared exponent of an mx block; it affects quantising only.
enum class MxRule : std::uint8_t {
  ceil,  ///< the smallest power of two that saturates nothing
  ocp,   ///< floor(log2 amax) - emax: large values may saturate
  even,  ///< ocp after rounding amax to the element's mantissa width
};
constexpr std::string_view name(MxRule r) { return r == MxRule::ceil ? "ceil" : r == MxRule::ocp ? "ocp" : "even"; }

inline constexpr float kAmaxFloor = 1e-10F;
inline constexpr float kTransportAmaxFloor = 1e-4F;
/// 4.359654e-6
inline constexpr float kMinScale = 1.0F / (448.0F * 512.0F);

/// max(amax, floor) / limit; `amax_bits` from abs_bits(). A scale group that holds NaN or infinity gets the scale NaN.
template <ScaleFloor Floor>
MOE_HD inline float scale_from_amax(std::uint32_t amax_bits, float limit) {
  if (amax_bits >= kInfBits) return quiet_nan();
  float const amax = bits_float(amax_bits);
  if constexpr (Floor == ScaleFloor::min_scale) {
    float const s = div_rn(amax, limit);
    return s < kMinScale ? kMinScale : s;
  } else {
    constexpr float kFloor = Floor == ScaleFloor::amax_1e10 ? kAmaxFloor : kTransportAmaxFloor;
    return div_rn(amax < kFloor ? kFloor : amax, limit);
  }
}

/// Exponent byte of the smallest power of two ≥ s > 0, clamped to [0, 254]; NaN and infinity give 255.
MOE_HD inline std::uint8_t ceil_e8m0(float s) {
  std::uint32_t const u = float_bits(s);
  if ((u & 0x7FFFFFFFU) >= kInfBits) return kE8m0Nan;
  if (u <= 0x00400000U) return 0;  // up to 2^-127
  std::uint32_t const b = (u >> 23) + ((u & 0x7FFFFFU) != 0 ? 1U : 0U);
  return static_cast<std::uint8_t>(b > 254U ? 254U : b);
}

/// Shared exponent byte of an mx block with elements of `Mantissa` bits and largest exponent `Emax` (e4m3: 3, 8; e2m1: 1, 2).
/// All-zero: 0. NaN or infinity inside: 255, so that the whole block decodes to NaN.
template <MxRule Rule, int Mantissa, int Emax>
MOE_HD inline std::uint8_t mx_exponent(std::uint32_t amax_bits) {
  if (amax_bits >= kInfBits) return kE8m0Nan;
  int b = 0;
  if constexpr (Rule == MxRule::ceil) {
    // Largest finite element: e4m3 1.75 · 2^8, e2m1 1.5 · 2^2. One more power of two exactly if amax's mantissa exceeds that of this
    // element.
    constexpr std::uint32_t kTop = Mantissa == 3 ? 0x600000U : 0x400000U;
    b = static_cast<int>(amax_bits >> 23) - Emax + ((amax_bits & 0x7FFFFFU) > kTop ? 1 : 0);
  } else if constexpr (Rule == MxRule::ocp) {
    b = static_cast<int>(amax_bits >> 23) - Emax;
  } else {
    b = static_cast<int>((amax_bits + (1U << (22 - Mantissa))) >> 23) - Emax;
  }
  return static_cast<std::uint8_t>(b < 0 ? 0 : b);
}

}  // namespace moe::quantization
