// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/codes.hpp: the layout of the codes of a brick in its words, chosen so that few instructions extract them. Plain C++,
// for host and device.
//
// e2m1: a fragment register holds two codes, one per half: sign at bit 15 of the half, exponent and mantissa at bits 8 to 6. Read as bf16
// that is the code's value times 2^-126. A pair of words holds eight registers f: 0 to 2 in the first word and 4 to 6 in the second,
// rotated so that they do not overlap. The remaining bits of both words, the second's shifted, hold registers 3 and 7. Half of the shifts
// are to the left, because units of a multiprocessor other than the logic units can do these.
//
// Codes of 8 bits: a word holds two registers, the first in its even bytes, the second in its odd bytes.
#pragma once

#include <cstdint>

#include "moe/core/types.hpp"

namespace moe::hopper {

inline constexpr std::uint32_t kE2m1Bits = 0x81C081C0u;     ///< the bits of a fragment register that hold its two codes
inline constexpr std::uint32_t kRestOfFirst = 0x0C180C18u;  ///< the bits of the first word that registers 0 to 2 leave free
inline constexpr int kRestShift = 2;                        ///< the second word's remaining bits, shifted left by this, fall between them

MOE_HD constexpr std::uint32_t rotate_left(std::uint32_t v, int bits) {
  int const n = bits & 31;
  return n == 0 ? v : (v << n) | (v >> (32 - n));
}
/// Register f is stored rotated to the left by this many bits (negative: to the right).
MOE_HD constexpr int e2m1_shift(int f) { return f == 3 ? 4 : f == 7 ? -2 : (f & 3) == 0 ? 0 : (f & 3) == 1 ? 6 : -6; }

/// f[i]: the two codes of register i, the first one in bits 0 to 3, the second in bits 4 to 7.
MOE_HD constexpr void pack_e2m1(std::uint32_t const (&f)[8], std::uint32_t& first, std::uint32_t& second) {
  std::uint32_t word[3] = {0, 0, 0};  // the third goes into the free bits of the other two
  for (int i = 0; i < 8; ++i) {
    std::uint32_t const low = ((f[i] & 8u) << 12) | ((f[i] & 7u) << 6);
    std::uint32_t const high = ((f[i] & 0x80u) << 24) | ((f[i] & 0x70u) << 18);
    word[(i & 3) == 3 ? 2 : i / 4] |= rotate_left(low | high, e2m1_shift(i));
  }
  first = word[0] | (word[2] & kRestOfFirst);
  second = word[1] | ((word[2] & ~kRestOfFirst) >> kRestShift);
}

/// Register f of the pair.
MOE_HD constexpr std::uint32_t unpack_e2m1(std::uint32_t first, std::uint32_t second, int f) {
  std::uint32_t const rest = (first & kRestOfFirst) | ((second << kRestShift) & ~kRestOfFirst);
  std::uint32_t const from = (f & 3) == 3 ? rest : f < 4 ? first : second;
  int const shift = e2m1_shift(f);
  return (shift > 0 ? rotate_left(from, -shift) : from << -shift) & kE2m1Bits;
}

/// f[i]: the two codes of register i of a word, the first one in bits 0 to 7, the second in bits 8 to 15.
MOE_HD constexpr std::uint32_t pack_bytes(std::uint32_t const (&f)[2]) {
  return (f[0] & 0xFFu) | (f[0] & 0xFF00u) << 8 | (f[1] & 0xFFu) << 8 | (f[1] & 0xFF00u) << 16;
}
/// Register f of the word, of int8: two bf16 whose differences to those of int8_bases() are the codes, exactly. Seven bits of a code are
/// the mantissa of 128 + bits; the eighth, the sign's, makes the base 256 instead of 128.
MOE_HD constexpr std::uint32_t int8_sums(std::uint32_t word, int f) { return ((word >> (8 * f)) & 0x007F007Fu) | 0x43004300u; }
MOE_HD constexpr std::uint32_t int8_bases(std::uint32_t word, int f) { return ((word >> (8 * f)) & 0x00800080u) | 0x43004300u; }

/// Register f of the word, of e4m3: two bf16 whose exponent fields end in those of the codes. Read as bf16 that is the codes' values times
/// 2^-120, subnormal ones too.
MOE_HD constexpr std::uint32_t e4m3_values(std::uint32_t word, int f) {
  std::uint32_t const magnitudes = f == 0 ? word << 4 : word >> 4;
  return (magnitudes & 0x07F007F0u) | ((f == 0 ? word << 8 : word) & 0x80008000u);
}
inline constexpr std::uint32_t kE4m3Multiplier = 0x7B807B80u;  ///< 2^120 as bf16, twice
inline constexpr int kE2m1Bias = 126;                          ///< exponent by which codes as read are too small
inline constexpr int kE4m3Bias = 120;

/// What is added to a scale byte, shifted left by 4, for the bits of the scale times 2^119 as bf16. The products with the codes as read are
/// then the weights over 2^7.
inline constexpr std::uint32_t kNvfp4ScaleBase = 0x7600u;
inline constexpr float kNvfp4Factor = 128.0F;

/// The stored form of the magnitude of an e4m3 scale: 5 bits of exponent and 3 of mantissa, so that subnormal numbers are normal. A scale
/// of zero has the byte 0, and its codes are stored as zero.
MOE_HD constexpr std::uint32_t nvfp4_scale_byte(std::uint32_t e4m3) {
  std::uint32_t const magnitude = e4m3 & 0x7Fu;
  if (magnitude >= 8) return magnitude + (3u << 3);
  std::uint32_t const m = magnitude;  // m · 2^-9
  return m == 0 ? 0 : m == 1 ? 1u << 3 : m < 4 ? (2u << 3) | ((m & 1u) << 2) : (3u << 3) | ((m & 3u) << 1);
}

}  // namespace moe::hopper
