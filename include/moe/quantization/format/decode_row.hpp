// SPDX-License-Identifier: Apache-2.0
// quantization/format/decode_row.hpp: a row of codes → float32 on the host, so that compilers vectorise it: one factor for a scale group,
// eight 4-bit codes at a time. The values are codec.decode(code, factor), bit for bit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "moe/quantization/format/codecs.hpp"

namespace moe::quantization::detail {

/// Whether a vector instruction shifts each lane by its own count. Where it does not, 4-bit codes are read from a table.
#if defined(__AVX2__) || defined(__aarch64__)
inline constexpr bool kLaneShifts = true;
#else
inline constexpr bool kLaneShifts = false;
#endif

/// Codecs of e2m1: their decode() has cases, and its subnormal products are slow on some processors.
template <class Codec>
inline constexpr bool kE2m1Codec = Codec::kPack == 2 && Codec::kCodeDType == DType::e2m1;

/// decode_e2m1() of a code below 16. Codes from 2 on are exponent and mantissa of a float32 below a bias, 1 is half of 2, 0 is zero.
MOE_HD inline float e2m1_value(std::uint32_t code) {
  constexpr std::uint32_t kBias = 252;  // of the exponent and the first bit of the mantissa: 2 + 252 are those of 1.0
  std::uint32_t const magnitude = code & 7U;
  std::uint32_t const bits = magnitude == 0 ? 0U : (magnitude + kBias - (magnitude == 1 ? 1U : 0U)) << 22;
  return bits_float(bits | (code & 8U) << 28);
}

template <class Codec, class Factor>
MOE_HD inline float code_value(Codec const& codec, std::uint32_t code, Factor factor) {
  if constexpr (kE2m1Codec<Codec>) {
    return e2m1_value(code) * factor;
  } else {
    return codec.decode(code, factor);
  }
}

/// `n` 4-bit codes that begin at a byte, under one factor.
template <bool LaneShifts = kLaneShifts, class Codec, class Factor>
MOE_HD void decode_nibbles(Codec const& codec, std::uint8_t const* codes, Factor factor, std::int64_t n, float* out) {
  std::int64_t i = 0;
  if constexpr (LaneShifts) {
    for (; i + 8 <= n; i += 8) {
      std::uint32_t word = 0;  // its lowest bits are the first code
      std::memcpy(&word, codes + i / 2, sizeof word);
      // g++ vectorises these eight at any level of optimisation with this pragma, and unrolls them at -O3 without.
#if defined(_OPENMP) && !defined(__clang__) && !defined(__CUDACC__)
#pragma omp simd
#endif
      for (int j = 0; j < 8; ++j) out[i + j] = code_value(codec, (word >> (4 * j)) & 15U, factor);
    }
  } else if (n >= 16) {
    float values[16];
    for (std::uint32_t code = 0; code < 16; ++code) values[code] = code_value(codec, code, factor);
    for (; i + 2 <= n; i += 2) {
      out[i] = values[codes[i / 2] & 15U];
      out[i + 1] = values[codes[i / 2] >> 4];
    }
  }
  for (; i < n; ++i) out[i] = code_value(codec, nibble(codes, i), factor);
}

/// One row of codes and its row of scales, one for every `group` columns → out [cols].
template <class Codec>
MOE_HD void decode_row(Codec const& codec, typename Codec::Code const* codes, typename Codec::Scale const* scales, std::int64_t cols,
                       std::int64_t group, float* out) {
  for (std::int64_t c = 0; c < cols; c += group) {
    std::int64_t const n = std::min(group, cols - c);
    auto const factor = codec.factor(*scales++);
    if constexpr (Codec::kPack == 1) {
      for (std::int64_t i = 0; i < n; ++i) out[c + i] = codec.decode(codes[c + i], factor);
    } else if (c % 2 == 0) {
      decode_nibbles(codec, codes + c / 2, factor, n, out + c);
    } else {  // a group of odd size begins inside a byte
      for (std::int64_t i = 0; i < n; ++i) out[c + i] = codec.decode(nibble(codes, c + i), factor);
    }
  }
}

}  // namespace moe::quantization::detail
