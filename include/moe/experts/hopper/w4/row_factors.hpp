// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/row_factors.hpp: how int4's float32 scales are stored: in fp16, over a power of two of their row, which multiplies the
// row's whole sum. Plain C++, for host and device.
//
// fp16 has 40 binades: with the largest scale in [2^14, 2^15) a scale keeps 11 significant bits down to 2^-14, one bit less in each binade
// below that, and under 2^-25 it is zero. Rows of one matrix may lie as far apart as float32 allows, so each row has a power of two of its
// own: of a row's scales those within 28 binades of its largest keep 11 bits, as those of bf16 and fp16 need, and only those 40 binades
// below it are zero.
//
// W4A16: fp16 over 2^wide_exponent(row). W4A8: over 2^unit_exponent(row) and the power of two of the brick, wide_exponent() of what the
// first leaves of the scales of its 64 rows by 128 of K.
#pragma once

#include <cmath>
#include <cstdint>

#include "moe/core/types.hpp"

namespace moe::hopper {

inline constexpr int kInfinityBits = 0x7F800000;

/// The larger of `most` and the bits of |scale|, by which floats that are not negative are ordered. Infinities and NaN do not count.
MOE_HD constexpr int larger_scale(int most, std::uint32_t scale_bits) {
  int const bits = static_cast<int>(scale_bits & 0x7FFFFFFFu);
  return bits < kInfinityBits && bits > most ? bits : most;
}
/// The exponent of the power of two over which the scale with these bits is in [1, 2); of subnormal numbers and zero that of the least
/// normal number, so that the power of two is normal.
MOE_HD constexpr int unit_exponent(int largest_bits) { return largest_bits < 0x00800000 ? -126 : (largest_bits >> 23) - 127; }
/// The same for [2^14, 2^15), the last binade but one of fp16.
MOE_HD constexpr int wide_exponent(int largest_bits) { return unit_exponent(largest_bits) - 14; }
/// The exponent of 2^n as a float32, subnormal ones, too.
MOE_HD inline int exponent_of(float power) { return std::ilogb(power); }
/// A scale over 2^exponent in fp16.
MOE_HD inline f16 scale_over(float scale, int exponent) { return from_float<f16>(std::ldexp(scale, -exponent)); }

}  // namespace moe::hopper
