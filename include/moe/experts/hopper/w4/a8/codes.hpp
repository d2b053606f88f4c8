// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/a8/codes.hpp: 4-bit codes as e4m3 numbers: the layout of the codes in words, their values, and the folding of e2m1's
// group scales into the codes. Plain C++, for host and device.
//
// e2m1 times 2^s is exact in e4m3 for s = -8 … 6: 0.5 · 2^-8 is e4m3's smallest subnormal number, 6 · 2^6 = 384 is below its largest, 448.
// So the powers of two of the four groups of 32 in a row's 128 of K are folded into the codes when they lie within 15 binades; one factor
// then scales the row's sum over 128. A brick with a row of wider spread keeps the four exponents, and its sums are scaled group by group.
//
// int4 codes less their zero point are integers of -15 to 15, which are exact in e4m3, too. Their scales are not powers of two: sums are
// scaled group by group, in float32, by scales in fp16 (row_factors.hpp).
#pragma once

#include <cstdint>

#include "moe/core/types.hpp"

namespace moe::hopper::w4a8 {

inline constexpr int kLeastShift = -8;
inline constexpr int kMostShift = 6;
inline constexpr int kShifts = kMostShift - kLeastShift + 1;
inline constexpr std::uint32_t kLeastNormal = 3;  ///< index of the least shift that makes no subnormal number
inline constexpr int kMostExponent = 252;         ///< a larger ue8m0 byte times 6 is not a finite float32

/// Magnitudes 0 to 7 of e2m1, times 2^shift, as e4m3 codes, each word's first in its low byte.
struct Magnitudes {
  std::uint32_t low;
  std::uint32_t high;
};
/// `index`: shift - kLeastShift, at least kLeastNormal. Such codes are normal numbers, in which a binade is 8.
MOE_HD constexpr Magnitudes normal_magnitudes(std::uint32_t index) {
  return {index * 0x08080800u + 0xFBF7F000u, index * 0x08080808u + 0x0C080400u};
}
/// Any index. Magnitudes 1 to 3 (of index 0, 4 and 5, too) are subnormal numbers below kLeastNormal.
MOE_HD constexpr Magnitudes magnitudes(std::uint32_t index) {
  Magnitudes m = normal_magnitudes(index);
  if (index < kLeastNormal) m.low = 0x03020100u << index;
  if (index == 0) m.high = 0x0C080604u;
  return m;
}

/// The e4m3 code of an integer of -15 to 15.
MOE_HD constexpr std::uint32_t e4m3_of(int v) {
  std::uint32_t const sign = v < 0 ? 0x80u : 0u;
  std::uint32_t m = static_cast<std::uint32_t>(v < 0 ? -v : v);
  if (m == 0) return 0;
  std::uint32_t exponent = 7;  // of 1
  for (std::uint32_t n = m; n > 1; n >>= 1) ++exponent;
  for (; m < 8; m <<= 1) {
  }
  return sign | exponent << 3 | (m & 7u);
}
/// The e4m3 codes of int4 codes `from` to `from` + 7 under a zero point, each word's first in its low byte.
MOE_HD constexpr Magnitudes int4_values(int from, int zero) {
  Magnitudes m{0, 0};
  for (int i = 0; i < 4; ++i) {
    m.low |= e4m3_of(from + i - zero) << (8 * i);
    m.high |= e4m3_of(from + 4 + i - zero) << (8 * i);
  }
  return m;
}

/// Eight codes of a row, of which the first four are one fragment register and the others another, in one word: bits 0 to 2 of nibble i are
/// the lower bits of code i; the highest bits (of e2m1 the signs) of the first four lie at bit 7 of each byte, of the others at bit 3.
MOE_HD constexpr std::uint32_t pack_word(std::uint32_t const (&code)[8]) {
  std::uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    word |= (code[i] & 7u) << (4 * i);
    word |= (code[i] >> 3 & 1u) << (8 * (i & 3) + (i < 4 ? 7 : 3));
  }
  return word;
}

/// The scales of a row's 128 of K, from ue8m0 bytes of four groups; a group that is not `used` has codes of zero only.
/// Folded: the table index of each group, shift - kLeastShift, in 4 bits each, then the byte of the common factor.
struct FoldedScales {
  std::uint32_t word;
  bool wide;  ///< they lie further apart than 15 binades; the word then has the four bytes
};
/// The four bytes of a row, also of one whose scales fold, in a brick with another row whose scales do not.
MOE_HD constexpr std::uint32_t wide_scales(std::uint32_t const (&exponent)[4], bool const (&used)[4]) {
  std::uint32_t word = 0;
  for (int g = 0; g < 4; ++g) {
    std::uint32_t const byte = used[g] ? exponent[g] : 0u;  // inside the shift, g++ 12 computes it wrongly under -fsanitize=bounds
    word |= byte << (8 * g);
  }
  return word;
}
MOE_HD constexpr FoldedScales fold_scales(std::uint32_t const (&exponent)[4], bool const (&used)[4]) {
  int most = -1;
  int least = 255;
  for (int g = 0; g < 4; ++g) {
    if (!used[g]) continue;
    int const e = static_cast<int>(exponent[g]);
    most = e > most ? e : most;
    least = e < least ? e : least;
  }
  if (most < 0) return {127u << 16 | static_cast<std::uint32_t>(-kLeastShift) * 0x1111u, false};
  if (most - least >= kShifts) return {wide_scales(exponent, used), true};
  std::uint32_t word = 0;
  int const common = most > kMostShift ? most - kMostShift : 0;
  for (int g = 0; g < 4; ++g) {
    int const shift = used[g] ? static_cast<int>(exponent[g]) - common : 0;
    word |= static_cast<std::uint32_t>(shift - kLeastShift) << (4 * g);
  }
  return {word | (static_cast<std::uint32_t>(common) << 16), false};
}

/// The index of group `g` in a folded word.
MOE_HD constexpr std::uint32_t scale_index(std::uint32_t word, int g) { return (word >> (4 * g)) & 15u; }

/// What a brick's scales need: nothing, magnitudes() because an index is below kLeastNormal, or a sum for each group of 32.
inline constexpr std::uint32_t kNormalBrick = 0;
inline constexpr std::uint32_t kWideBrick = 1;
inline constexpr std::uint32_t kSubnormalBrick = 2;
/// Whether a folded word has an index below kLeastNormal.
MOE_HD constexpr bool has_subnormals(std::uint32_t word) {
  bool any = false;
  for (int g = 0; g < 4; ++g) any = any || scale_index(word, g) < kLeastNormal;
  return any;
}

}  // namespace moe::hopper::w4a8
