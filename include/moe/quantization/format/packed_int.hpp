// SPDX-License-Identifier: Apache-2.0
// quantization/format/packed_int.hpp: weight-only integers as GPTQ, AWQ and compressed-tensors checkpoints pack them, to and from the
// internal layout. docs/semantics/quantization.md §5.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/quantization/format/codecs.hpp"
#include "moe/quantization/format/int_format.hpp"

namespace moe::quantization {

/// One weight matrix of integer codes, unpacked: x̂[n, k] = (codes[n, k] - zeros[n, k / group]) · scales[n, k / group].
struct IntWeight {
  int bits = 4;
  std::int64_t rows = 0;            ///< N, output channels
  std::int64_t cols = 0;            ///< K
  std::int64_t group = 0;           ///< elements of a group along K; cols if a row is one group
  std::vector<std::uint8_t> codes;  ///< [N, K], 0 … 2^bits - 1
  std::vector<float> scales;        ///< [N, K / group]
  std::vector<std::uint8_t> zeros;  ///< [N, K / group]; empty: symmetric, 2^(bits - 1)

  std::int64_t groups() const { return cols / group; }
  int zero(std::int64_t n, std::int64_t g) const {
    return zeros.empty() ? 1 << (bits - 1) : zeros[static_cast<std::size_t>(n * groups() + g)];
  }
  /// x̂ [N, K] in float32.
  std::vector<float> dequantize() const {
    std::vector<float> out(codes.size());
    for (std::int64_t n = 0; n < rows; ++n) {
      for (std::int64_t k = 0; k < cols; ++k) {
        auto const i = static_cast<std::size_t>(n * cols + k);
        out[i] = static_cast<float>(codes[i] - zero(n, k / group)) * scales[static_cast<std::size_t>(n * groups() + k / group)];
      }
    }
    return out;
  }
};

namespace detail {

/// Order of the nibbles along N in a 32-bit word of AWQ: nibble i holds column kAwqOrder[i].
inline constexpr std::array<int, 8> kAwqOrder{0, 2, 4, 6, 1, 3, 5, 7};

inline std::uint8_t field(std::int32_t word, int index, int bits) {
  return static_cast<std::uint8_t>((static_cast<std::uint32_t>(word) >> (index * bits)) & ((1U << bits) - 1U));
}
inline void expect_size(std::string_view what, std::size_t got, std::int64_t want) {
  if (got != static_cast<std::size_t>(want)) throw Error(ErrorCode::argument, text(what, " has ", got, " elements, expected ", want));
}
inline IntWeight int_weight(int bits, int group_size, std::int64_t rows, std::int64_t cols) {
  check_int_format(bits, group_size);
  std::int64_t const group = group_size == -1 ? cols : group_size;
  int const per_word = 32 / bits;
  if (rows <= 0 || cols <= 0 || cols % group != 0 || cols % per_word != 0) {
    throw Error(ErrorCode::config, text("packed weight [", rows, ", ", cols, "]: K must be a positive multiple of the group size ", group,
                                        " and of ", per_word, " codes a word"));
  }
  return {.bits = bits,
          .rows = rows,
          .cols = cols,
          .group = group,
          .codes = std::vector<std::uint8_t>(static_cast<std::size_t>(rows * cols)),
          .scales = std::vector<float>(static_cast<std::size_t>(rows * (cols / group))),
          .zeros = {}};
}
/// scales [G, N] → [N, G]
inline void transpose_scales(std::span<float const> scales, IntWeight& w) {
  expect_size("scales", scales.size(), w.rows * w.groups());
  for (std::int64_t n = 0; n < w.rows; ++n) {
    for (std::int64_t g = 0; g < w.groups(); ++g) {
      w.scales[static_cast<std::size_t>(n * w.groups() + g)] = scales[static_cast<std::size_t>(g * w.rows + n)];
    }
  }
}

}  // namespace detail

/// Tensors of a GPTQ matrix. scales widened to float32.
struct GptqTensors {
  std::span<std::int32_t const> qweight;  ///< [K · bits / 32, N], codes along K, low first
  std::span<std::int32_t const> qzeros;   ///< [K / group, N · bits / 32]; empty: symmetric
  std::span<float const> scales;          ///< [K / group, N]
  std::span<std::int32_t const> g_idx;    ///< [K] group of each k, or empty
  int bits = 4;
  int group_size = 128;         ///< -1: one group
  bool zeros_minus_one = true;  ///< format v1 stores z - 1
};

/// A GPTQ matrix [N, K]. E_UNSUPPORTED if g_idx orders the columns by activation ("desc_act"): groups are then not consecutive.
inline IntWeight read_gptq(GptqTensors const& t, std::int64_t rows, std::int64_t cols) {
  IntWeight w = detail::int_weight(t.bits, t.group_size, rows, cols);
  int const per_word = 32 / t.bits;
  detail::expect_size("qweight", t.qweight.size(), cols / per_word * rows);
  if (!t.g_idx.empty()) {
    detail::expect_size("g_idx", t.g_idx.size(), cols);
    for (std::int64_t k = 0; k < cols; ++k) {
      if (t.g_idx[static_cast<std::size_t>(k)] != k / w.group) {
        throw Error(ErrorCode::unsupported, text("desc_act: g_idx[", k, "] is ", t.g_idx[static_cast<std::size_t>(k)], ", only ",
                                                 k / w.group, " = k / group is supported"));
      }
    }
  }
  for (std::int64_t n = 0; n < rows; ++n) {
    for (std::int64_t k = 0; k < cols; ++k) {
      w.codes[static_cast<std::size_t>(n * cols + k)] =
          detail::field(t.qweight[static_cast<std::size_t>(k / per_word * rows + n)], static_cast<int>(k % per_word), t.bits);
    }
  }
  detail::transpose_scales(t.scales, w);
  if (!t.qzeros.empty()) {
    if (rows % per_word != 0) throw Error(ErrorCode::config, text("N ", rows, " is not a multiple of ", per_word, " zero points a word"));
    detail::expect_size("qzeros", t.qzeros.size(), w.groups() * rows / per_word);
    w.zeros.resize(w.scales.size());
    for (std::int64_t g = 0; g < w.groups(); ++g) {
      for (std::int64_t n = 0; n < rows; ++n) {
        int const stored =
            detail::field(t.qzeros[static_cast<std::size_t>((g * rows + n) / per_word)], static_cast<int>(n % per_word), t.bits);
        // v1 stored z - 1 in an unsigned field: z = 0 is stored as all ones.
        int const zero = t.zeros_minus_one ? (stored + 1) & ((1 << t.bits) - 1) : stored;
        w.zeros[static_cast<std::size_t>(n * w.groups() + g)] = static_cast<std::uint8_t>(zero);
      }
    }
  }
  return w;
}

/// Tensors of an AWQ matrix: 4 bits, nibbles along N in the order 0, 2, 4, 6, 1, 3, 5, 7.
struct AwqTensors {
  std::span<std::int32_t const> qweight;  ///< [K, N / 8]
  std::span<std::int32_t const> qzeros;   ///< [K / group, N / 8]; empty: symmetric
  std::span<float const> scales;          ///< [K / group, N]
  int bits = 4;
  int group_size = 128;
};

/// An AWQ matrix [N, K].
inline IntWeight read_awq(AwqTensors const& t, std::int64_t rows, std::int64_t cols) {
  if (t.bits != 4) throw Error(ErrorCode::config, text("AWQ weights are 4 bit, got ", t.bits, " bits"));
  if (rows % 8 != 0) throw Error(ErrorCode::config, text("AWQ packs 8 output channels a word: N ", rows, " is not a multiple of 8"));
  IntWeight w = detail::int_weight(t.bits, t.group_size, rows, cols);
  detail::expect_size("qweight", t.qweight.size(), cols * rows / 8);
  for (std::int64_t k = 0; k < cols; ++k) {
    for (std::int64_t n = 0; n < rows; ++n) {
      std::int32_t const word = t.qweight[static_cast<std::size_t>((k * rows + n) / 8)];
      // The order is "even columns, then odd ones": column c lies in nibble c / 2 (+ 4 if odd).
      int const c = static_cast<int>(n % 8);
      w.codes[static_cast<std::size_t>(n * cols + k)] = detail::field(word, c / 2 + (c % 2) * 4, 4);
    }
  }
  detail::transpose_scales(t.scales, w);
  if (!t.qzeros.empty()) {
    detail::expect_size("qzeros", t.qzeros.size(), w.groups() * rows / 8);
    w.zeros.resize(w.scales.size());
    for (std::int64_t g = 0; g < w.groups(); ++g) {
      for (std::int64_t n = 0; n < rows; ++n) {
        int const c = static_cast<int>(n % 8);
        w.zeros[static_cast<std::size_t>(n * w.groups() + g)] =
            detail::field(t.qzeros[static_cast<std::size_t>((g * rows + n) / 8)], c / 2 + (c % 2) * 4, 4);
      }
    }
  }
  return w;
}

/// Tensors of a compressed-tensors matrix (pack-quantized).
struct CompressedTensors {
  std::span<std::int32_t const> weight_packed;      ///< [N, K · bits / 32], low first
  std::span<std::int32_t const> weight_zero_point;  ///< [N · bits / 32, K / group], low first along N; empty: symmetric
  std::span<float const> weight_scale;              ///< [N, K / group]
  int bits = 4;
  int group_size = 128;
};

/// A compressed-tensors matrix; weight_shape of the checkpoint gives [N, K].
inline IntWeight read_compressed_tensors(CompressedTensors const& t, std::int64_t rows, std::int64_t cols) {
  IntWeight w = detail::int_weight(t.bits, t.group_size, rows, cols);
  int const per_word = 32 / t.bits;
  detail::expect_size("weight_packed", t.weight_packed.size(), rows * cols / per_word);
  for (std::size_t i = 0; i < w.codes.size(); ++i) {
    w.codes[i] = detail::field(t.weight_packed[i / static_cast<std::size_t>(per_word)], static_cast<int>(i) % per_word, t.bits);
  }
  detail::expect_size("weight_scale", t.weight_scale.size(), rows * w.groups());
  w.scales.assign(t.weight_scale.begin(), t.weight_scale.end());
  if (!t.weight_zero_point.empty()) {
    if (rows % per_word != 0) throw Error(ErrorCode::config, text("N ", rows, " is not a multiple of ", per_word, " zero points a word"));
    detail::expect_size("weight_zero_point", t.weight_zero_point.size(), rows / per_word * w.groups());
    w.zeros.resize(w.scales.size());
    for (std::int64_t n = 0; n < rows; ++n) {
      for (std::int64_t g = 0; g < w.groups(); ++g) {
        w.zeros[static_cast<std::size_t>(n * w.groups() + g)] = detail::field(
            t.weight_zero_point[static_cast<std::size_t>(n / per_word * w.groups() + g)], static_cast<int>(n % per_word), t.bits);
      }
    }
  }
  return w;
}

/// Codes [N, K] as 32-bit words [N, K · bits / 32], low first: weight_packed of compressed-tensors.
inline std::vector<std::int32_t> pack_words(IntWeight const& w) {
  auto const per_word = static_cast<std::size_t>(32 / w.bits);
  std::vector<std::uint32_t> words(w.codes.size() / per_word);
  for (std::size_t i = 0; i < w.codes.size(); ++i) {
    words[i / per_word] |= static_cast<std::uint32_t>(w.codes[i]) << (static_cast<int>(i % per_word) * w.bits);
  }
  return {words.begin(), words.end()};
}

/// Writes the arrays that Scheme, a WNa16 of the same bits, computes with: codes [N, weight_code_cols(K)], scales [weight_scale_count(N,
/// K)]. If the scheme's group is smaller than the checkpoint's, scales are repeated. E_CONFIG if the bits or groups do not fit, or if the
/// scheme cannot store a zero point.
template <class Scheme>
void to_internal(IntWeight const& w, std::uint8_t* codes, typename Scheme::WeightScale* scales) {
  constexpr bool kHasZero = std::is_same_v<typename Scheme::WeightScale, ScaleZero>;
  std::int64_t const group = effective_group(w.cols, Scheme::kWeightGroupCols);
  if (w.bits != 8 / Scheme::kWeightPack || group == 0 || w.group % group != 0) {
    throw Error(ErrorCode::config, text(Scheme::kName, " cannot hold ", w.bits, " bit weights in groups of ", w.group, " with K ", w.cols));
  }
  std::int64_t const packed_cols = Scheme::weight_code_cols(w.cols);
  for (std::int64_t n = 0; n < w.rows; ++n) {
    for (std::int64_t k = 0; k < w.cols; ++k) {
      detail::store_code<typename Scheme::WeightCodec>(codes + n * packed_cols, k, w.codes[static_cast<std::size_t>(n * w.cols + k)]);
    }
    for (std::int64_t k = 0; k < w.cols; k += group) {
      float const scale = w.scales[static_cast<std::size_t>(n * w.groups() + k / w.group)];
      int const zero = w.zero(n, k / w.group);
      if constexpr (kHasZero) {
        *scales++ = {scale, static_cast<float>(zero)};
      } else {
        if (zero != Scheme::WeightCodec::kZero) {
          throw Error(ErrorCode::config, text(Scheme::kName, " is symmetric, but row ", n, " has the zero point ", zero));
        }
        *scales++ = scale;
      }
    }
  }
}

/// Zero points of two output channels per byte, [N / 2, K / group], the even channel in the low nibble: the layout of packed 4-bit kernels.
inline std::vector<std::uint8_t> pack_zero_points(IntWeight const& w) {
  if (w.bits != 4 || w.rows % 2 != 0) {
    throw Error(ErrorCode::config, text("zero points are packed for 4 bit and even N, got ", w.bits, " bits and N ", w.rows));
  }
  std::vector<std::uint8_t> out(static_cast<std::size_t>(w.rows / 2 * w.groups()));
  for (std::int64_t n = 0; n < w.rows; n += 2) {
    for (std::int64_t g = 0; g < w.groups(); ++g) {
      out[static_cast<std::size_t>(n / 2 * w.groups() + g)] =
          pack_nibbles(static_cast<std::uint32_t>(w.zero(n, g)), static_cast<std::uint32_t>(w.zero(n + 1, g)));
    }
  }
  return out;
}

}  // namespace moe::quantization
