// SPDX-License-Identifier: Apache-2.0
// backends/common/combine_format.hpp: how expert outputs travel back: uncoded, as e4m3, or as LogFMT-10. One row at a time.
// docs/semantics/exchange.md §8.2.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "moe/core/types.hpp"
#include "moe/quantization/format/codecs.hpp"

namespace moe::backends {

/// How expert outputs travel back. Formats other than `plain` cost accuracy (docs/log/exchange.md) and a pass over the outputs.
enum class CombineFormat : std::uint8_t {
  plain,   ///< as the experts wrote them (device: bf16)
  fp8,     ///< e4m3 with a float scale for each 128 values: error at most 2^-4 of a value, or 2^-10 of the scale
  logfmt,  ///< sign and 9 bits of logarithm between least and largest magnitude of 128 values; bf16 where the largest is at least 1
};
constexpr char const* name(CombineFormat f) { return f == CombineFormat::plain ? "plain" : f == CombineFormat::fp8 ? "fp8" : "logfmt"; }

}  // namespace moe::backends

namespace moe::detail {

using backends::CombineFormat;

inline constexpr int kCombineGroup = 128;
inline constexpr int kLogFmtGroupBytes = 256;  ///< bytes between groups of a row
inline constexpr int kLogFmtCodes = 511;       ///< codes of magnitudes; 0 is zero
inline constexpr float kLogFmtRange = 32.0F;   ///< binary orders of magnitude below the largest that are kept
using CombineCodec = quantization::Fp8Codec<quantization::ScaleFloor::amax_1e4>;

/// Bytes of a row's codes, and words of its headers (a float scale, or bf16 amax below bf16 amin): one header per 128 values.
MOE_HD constexpr std::int64_t combine_groups(std::int64_t hidden) { return (hidden + kCombineGroup - 1) / kCombineGroup; }
MOE_HD constexpr std::int64_t combine_row_bytes(CombineFormat f, std::int64_t hidden) {
  return f == CombineFormat::fp8 ? hidden : f == CombineFormat::logfmt ? combine_groups(hidden) * kLogFmtGroupBytes : 2 * hidden;
}

MOE_HD inline float bits_to_float(std::uint32_t bits) {
  float f;
  memcpy(&f, &bits, sizeof f);
  return f;
}

/// The code of one group, from its largest and least nonzero magnitude, both as bf16 bits (magnitudes: 15 bits). Code c stands for 2^(lmin
/// + (c - 1) step); a magnitude gets the code with the nearest value.
class LogFmt {
 public:
  MOE_HD explicit LogFmt(std::uint32_t header) {
    std::uint32_t const amax = header & 0x7fffU;
    float const lmax = log2f(bits_to_float(amax << 16));
    lmin_ = fmaxf(log2f(bits_to_float(header & 0x7fff0000U)), lmax - kLogFmtRange);
    step_ = (lmax - lmin_) / static_cast<float>(kLogFmtCodes - 1);
    used_ = amax != 0 && amax < 0x3f80U && lmin_ < lmax;
    inverse_ = used_ ? 1.0F / step_ : 0.0F;
    offset_ = used_ ? 2.0F - log2f((1.0F + exp2f(step_)) / 2.0F) * inverse_ - lmin_ * inverse_ : 0.0F;
  }
  /// False: the group travels as bf16.
  MOE_HD bool used() const { return used_; }
  MOE_HD float step() const { return step_; }
  MOE_HD std::uint32_t encode(float magnitude) const {
    if (magnitude == 0.0F) {
      return 0;
    }
    float const c = floorf(log2f(magnitude) * inverse_ + offset_);
    return static_cast<std::uint32_t>(fminf(fmaxf(c, 0.0F), static_cast<float>(kLogFmtCodes)));
  }
  MOE_HD float decode(std::uint32_t code) const { return code == 0 ? 0.0F : exp2f(lmin_ + (static_cast<float>(code) - 1.0F) * step_); }

 private:
  float lmin_, step_, inverse_, offset_;
  bool used_;
};

// Layout of a LogFMT group in its 256 bytes. Coded: the low 8 bits of the codes of 16 values at 16 u, their ninth bits and signs (2 bits a
// value) at 128 + 4 u. As bf16: the first 8 of 16 values at 16 u, the others at 128 + 16 u. In both cases a reader needs the first 16
// bytes, so it may load them before it knows the format.

/// Codes one row on the host: `x` to `codes` and `headers`. LogFMT rounds to bf16 first.
template <class T>
void encode_row(CombineFormat format, T const* x, std::int64_t hidden, std::byte* codes, std::uint32_t* headers) {
  for (std::int64_t g = 0; g < combine_groups(hidden); ++g) {
    std::int64_t const begin = g * kCombineGroup;
    std::int64_t const n = std::min<std::int64_t>(kCombineGroup, hidden - begin);
    if (format == CombineFormat::fp8) {
      std::uint32_t amax = 0;
      for (std::int64_t i = 0; i < n; ++i) {
        amax = std::max(amax, CombineCodec::magnitude(to_float(x[begin + i])));
      }
      float const scale = CombineCodec::scale(amax);
      std::memcpy(headers + g, &scale, sizeof scale);
      for (std::int64_t i = 0; i < n; ++i) {
        codes[begin + i] = static_cast<std::byte>(CombineCodec::encode(to_float(x[begin + i]), scale));
      }
      continue;
    }
    std::uint16_t bits[kCombineGroup] = {};
    std::uint32_t amax = 0;
    std::uint32_t amin = 0x7fff;
    for (std::int64_t i = 0; i < n; ++i) {
      bf16 const v = from_float<bf16>(to_float(x[begin + i]));
      std::memcpy(&bits[i], &v, sizeof v);
      std::uint32_t const m = bits[i] & 0x7fffU;
      amax = std::max(amax, m);
      amin = m == 0 ? amin : std::min(amin, m);
    }
    headers[g] = amax | (amin << 16);
    LogFmt const code(headers[g]);
    std::byte* const group = codes + g * kLogFmtGroupBytes;
    for (int i = 0; i < kCombineGroup; ++i) {
      int const u = i / 16;
      if (code.used()) {
        std::uint32_t const c = code.encode(bits_to_float((bits[i] & 0x7fffU) << 16));
        group[i] = static_cast<std::byte>(c & 0xffU);
        std::uint32_t word = 0;
        std::memcpy(&word, group + 128 + 4 * u, sizeof word);
        int const shift = 2 * (i % 16);
        word = (word & ~(3U << shift)) | (((c >> 8) | (static_cast<std::uint32_t>(bits[i] >> 15) << 1)) << shift);
        std::memcpy(group + 128 + 4 * u, &word, sizeof word);
      } else {
        std::memcpy(group + (i % 16 < 8 ? 0 : 128) + 16 * u + 2 * (i % 8), &bits[i], sizeof bits[i]);
      }
    }
  }
}

/// Decodes the row that encode_row() wrote, in float.
inline void decode_row(CombineFormat format, std::byte const* codes, std::uint32_t const* headers, std::int64_t hidden, float* out) {
  for (std::int64_t g = 0; g < combine_groups(hidden); ++g) {
    std::int64_t const begin = g * kCombineGroup;
    std::int64_t const n = std::min<std::int64_t>(kCombineGroup, hidden - begin);
    if (format == CombineFormat::fp8) {
      for (std::int64_t i = 0; i < n; ++i) {
        out[begin + i] = CombineCodec::decode(static_cast<std::uint32_t>(codes[begin + i]), bits_to_float(headers[g]));
      }
      continue;
    }
    LogFmt const code(headers[g]);
    std::byte const* const group = codes + g * kLogFmtGroupBytes;
    for (std::int64_t i = 0; i < n; ++i) {
      std::int64_t const u = i / 16;
      if (code.used()) {
        std::uint32_t word = 0;
        std::memcpy(&word, group + 128 + 4 * u, sizeof word);
        std::uint32_t const top = word >> (2 * (i % 16));
        float const m = code.decode(static_cast<std::uint32_t>(group[i]) | ((top & 1U) << 8));
        out[begin + i] = (top & 2U) != 0 ? -m : m;
      } else {
        std::uint16_t bits = 0;
        std::memcpy(&bits, group + (i % 16 < 8 ? 0 : 128) + 16 * u + 2 * (i % 8), sizeof bits);
        out[begin + i] = bits_to_float(static_cast<std::uint32_t>(bits) << 16);
      }
    }
  }
}

}  // namespace moe::detail
