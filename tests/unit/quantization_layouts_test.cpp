// SPDX-License-Identifier: Apache-2.0
// tests/unit/quantization_layouts_test.cpp: scale layouts, padding and checkpoint packings: docs/semantics/quantization.md §13, Q8, Q10,
// Q11, Q17, Q20.
#include "moe/quantization/format/packed_int.hpp"
#include "moe/quantization/int4_group128.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "expect_error.hpp"
#include "moe/quantization/format/layouts.hpp"
#include "moe/quantization/mxfp4.hpp"

namespace {

using namespace moe::quantization;
using moe_test::what_of;

TEST(QuantizationLayouts, Q8_SwizzleRoundTrip) {
  for (std::int64_t const rows : {1, 127, 128, 129}) {
    for (std::int64_t const cols : {4, 5}) {
      SwizzledScales const layout{rows, cols};
      std::vector<std::uint8_t> linear(static_cast<std::size_t>(rows * cols)), back(linear.size());
      for (std::size_t i = 0; i < linear.size(); ++i) linear[i] = static_cast<std::uint8_t>(1 + i * 7 % 255);
      std::vector<std::uint8_t> swizzled(static_cast<std::size_t>(layout.size()), 0xEE);
      swizzle(layout, linear.data(), swizzled.data());
      unswizzle(layout, swizzled.data(), back.data());
      EXPECT_EQ(back, linear) << rows << " x " << cols;
      EXPECT_EQ(layout.size(), (rows <= 128 ? 128 : 256) * (cols == 4 ? 4 : 8));
      EXPECT_EQ(std::count(swizzled.begin(), swizzled.end(), 0), layout.size() - rows * cols);
    }
  }
}
TEST(QuantizationLayouts, Q8_SwizzleIsTheTransposedView) {
  // [m / 128, 4, 32, k / 4, 4] with dimensions 1 and 3 exchanged.
  SwizzledScales const layout{256, 8};
  std::int64_t at = 0;
  for (std::int64_t m = 0; m < 2; ++m)
    for (std::int64_t k = 0; k < 2; ++k)
      for (std::int64_t r = 0; r < 32; ++r)
        for (std::int64_t q = 0; q < 4; ++q)
          for (std::int64_t c = 0; c < 4; ++c) EXPECT_EQ(layout.offset(m * 128 + q * 32 + r, k * 4 + c), at++);
}

TEST(QuantizationLayouts, Q20_PackedUe8m0NeedsMultiplesOf512) {
  EXPECT_EQ(what_of([] { PackedUe8m0::of(4, 2560 + 128); }),
            "E_UNSUPPORTED: packed UE8M0 scales need hidden to be a multiple of 512, got 2688");
  auto const layout = PackedUe8m0::of(3, 1024);
  EXPECT_EQ(layout.size(), 8);
  std::vector<std::uint8_t> linear(24);
  std::iota(linear.begin(), linear.end(), std::uint8_t{1});
  std::vector<std::int32_t> packed(8);
  pack_ue8m0(layout, linear.data(), packed.data());
  EXPECT_EQ(packed, (std::vector<std::int32_t>{0x04030201, 0x0C0B0A09, 0x14131211, 0, 0x08070605, 0x100F0E0D, 0x18171615, 0}));
}

TEST(QuantizationLayouts, BatchedScalesAreColumnMajor) {
  ColumnMajorScales const layout{.experts = 2, .capacity = 5, .groups = 3};
  EXPECT_EQ(layout.padded_capacity(), 8);
  EXPECT_EQ(layout.offset(0, 1, 0), 1);
  EXPECT_EQ(layout.offset(0, 0, 1), 8);
  EXPECT_EQ(layout.offset(1, 0, 0), 24);
  EXPECT_EQ(layout.size(), 48);
}

TEST(QuantizationLayouts, Q17_PaddedMxfp4EqualsUnpadded) {
  constexpr std::int64_t kRows = 24, kCols = 2880, kPadded = 3072;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::vector<float> w(kRows * kCols), x(kCols);
  for (float& v : w) v = normal(random);
  for (float& v : x) v = normal(random);
  std::vector<std::uint8_t> codes(kRows * kCols / 2), scales(kRows * kCols / 32);
  using Scheme = Mxfp4W4A16<>;
  Scheme{}.quantize_weight<float>(w.data(), kRows, kCols, codes.data(), scales.data());
  std::vector<std::uint8_t> padded_codes(32 * kPadded / 2), padded_scales(32 * kPadded / 32);
  pad_matrix<std::uint8_t>(codes.data(), kRows, kCols / 2, padded_codes.data(), 32, kPadded / 2, 0);
  pad_matrix<std::uint8_t>(scales.data(), kRows, kCols / 32, padded_scales.data(), 32, kPadded / 32, 127);
  x.resize(kPadded, 0.0F);
  std::vector<float> row(kPadded);
  auto const product = [&](std::vector<std::uint8_t> const& q, std::vector<std::uint8_t> const& s, std::int64_t rows, std::int64_t cols,
                           std::int64_t r) {
    Scheme{}.dequantize_weight_row<float>(q.data(), s.data(), rows, cols, r, row.data());
    return std::inner_product(row.begin(), row.begin() + cols, x.begin(), 0.0F);
  };
  for (std::int64_t r = 0; r < kRows; ++r) {
    EXPECT_EQ(product(padded_codes, padded_scales, 32, kPadded, r), product(codes, scales, kRows, kCols, r));
  }
  for (std::int64_t r = kRows; r < 32; ++r) EXPECT_EQ(product(padded_codes, padded_scales, 32, kPadded, r), 0.0F);
  EXPECT_THROW(pad_matrix<std::uint8_t>(codes.data(), kRows, kCols / 2, padded_codes.data(), 8, kPadded / 2, 0), moe::Error);
}

// ---- Checkpoint packings. The packing is written here from the table of docs/semantics/quantization.md §5, because the library only
// reads.

constexpr std::int64_t kN = 16, kK = 64, kGroup = 32;

struct Source {
  std::vector<std::uint8_t> codes = std::vector<std::uint8_t>(kN * kK);           // [N, K]
  std::vector<std::uint8_t> zeros = std::vector<std::uint8_t>(kN * kK / kGroup);  // [N, G]
  std::vector<float> scales = std::vector<float>(kN * kK / kGroup);               // [N, G]
  std::vector<float> scales_t = std::vector<float>(kN * kK / kGroup);             // [G, N]
  std::vector<float> dequantized = std::vector<float>(kN * kK);

  explicit Source(bool symmetric, int bits = 4) {
    std::mt19937 random(11);
    for (auto& c : codes) c = static_cast<std::uint8_t>(random() % (1U << bits));
    for (auto& z : zeros) z = static_cast<std::uint8_t>(symmetric ? 1U << (bits - 1) : random() % (1U << bits));
    for (std::size_t i = 0; i < scales.size(); ++i) scales[i] = 0.01F * static_cast<float>(1 + random() % 50);
    for (std::int64_t n = 0; n < kN; ++n) {
      for (std::int64_t g = 0; g < kK / kGroup; ++g) scales_t[at(g, n, kN)] = scales[at(n, g, kK / kGroup)];
      for (std::int64_t k = 0; k < kK; ++k) {
        std::size_t const i = at(n, k, kK), s = at(n, k / kGroup, kK / kGroup);
        dequantized[i] = static_cast<float>(codes[i] - zeros[s]) * scales[s];
      }
    }
  }
  static std::size_t at(std::int64_t r, std::int64_t c, std::int64_t cols) { return static_cast<std::size_t>(r * cols + c); }
};

/// Words of [rows, cols] values packed along a dimension: `along_rows` puts rows 8i … 8i+7 of a column in word [i, col].
std::vector<std::int32_t> pack(std::vector<std::uint8_t> const& v, std::int64_t rows, std::int64_t cols, bool along_rows, int bits,
                               std::vector<int> const& order) {
  int const per_word = 32 / bits;
  std::vector<std::uint32_t> words(v.size() / static_cast<std::size_t>(per_word));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      std::int64_t const word = along_rows ? r / per_word * cols + c : (r * cols + c) / per_word;
      int const lane = static_cast<int>((along_rows ? r : c) % per_word);
      int position = 0;
      while (order[static_cast<std::size_t>(position)] != lane) ++position;
      words[static_cast<std::size_t>(word)] |= static_cast<std::uint32_t>(v[Source::at(r, c, cols)]) << (position * bits);
    }
  }
  return {words.begin(), words.end()};
}
std::vector<std::uint8_t> transposed(std::vector<std::uint8_t> const& v, std::int64_t rows, std::int64_t cols) {
  std::vector<std::uint8_t> out(v.size());
  for (std::int64_t r = 0; r < rows; ++r)
    for (std::int64_t c = 0; c < cols; ++c) out[Source::at(c, r, rows)] = v[Source::at(r, c, cols)];
  return out;
}
std::vector<int> const kPlain{0, 1, 2, 3, 4, 5, 6, 7};
std::vector<int> const kAwq{0, 2, 4, 6, 1, 3, 5, 7};

struct Packed {
  std::vector<std::int32_t> gptq, gptq_zeros, awq, awq_zeros, ct, ct_zeros;
  Packed(Source const& s, int stored_offset, int bits = 4) {
    std::int64_t const groups = kK / kGroup;
    auto const codes_t = transposed(s.codes, kN, kK);
    auto const zeros_t = transposed(s.zeros, kN, groups);
    auto shifted = zeros_t;
    for (auto& z : shifted) z = static_cast<std::uint8_t>((z - stored_offset) & ((1 << bits) - 1));
    gptq = pack(codes_t, kK, kN, true, bits, kPlain);
    gptq_zeros = pack(shifted, groups, kN, false, bits, kPlain);
    ct = pack(s.codes, kN, kK, false, bits, kPlain);
    ct_zeros = pack(s.zeros, kN, groups, true, bits, kPlain);
    if (bits == 4) {
      awq = pack(codes_t, kK, kN, false, bits, kAwq);
      awq_zeros = pack(zeros_t, groups, kN, false, bits, kAwq);
    }
  }
};

TEST(QuantizationPackings, Q10_AllThreeGiveTheSameMatrix) {
  Source const s(false);
  Packed const p(s, 1);
  auto const gptq =
      read_gptq({.qweight = p.gptq, .qzeros = p.gptq_zeros, .scales = s.scales_t, .g_idx = {}, .bits = 4, .group_size = 32}, kN, kK);
  auto const awq = read_awq({.qweight = p.awq, .qzeros = p.awq_zeros, .scales = s.scales_t, .bits = 4, .group_size = 32}, kN, kK);
  auto const ct = read_compressed_tensors(
      {.weight_packed = p.ct, .weight_zero_point = p.ct_zeros, .weight_scale = s.scales, .bits = 4, .group_size = 32}, kN, kK);
  EXPECT_EQ(gptq.dequantize(), s.dequantized);
  EXPECT_EQ(awq.dequantize(), s.dequantized);
  EXPECT_EQ(ct.dequantize(), s.dequantized);
  EXPECT_EQ(pack_words(ct), p.ct);
  // Into the arrays of the scheme: the same values row by row.
  using Scheme = WNa16<4, 32, true>;
  std::vector<std::uint8_t> codes(kN * kK / 2);
  std::vector<ScaleZero> scales(static_cast<std::size_t>(Scheme::weight_scale_count(kN, kK)));
  to_internal<Scheme>(awq, codes.data(), scales.data());
  std::vector<float> row(kK);
  for (std::int64_t n = 0; n < kN; ++n) {
    Scheme{}.dequantize_weight_row<float>(codes.data(), scales.data(), kN, kK, n, row.data());
    EXPECT_EQ(row, std::vector<float>(s.dequantized.begin() + n * kK, s.dequantized.begin() + (n + 1) * kK));
  }
  auto const zeros = pack_zero_points(gptq);
  EXPECT_EQ(zeros.at(0), gptq.zero(0, 0) | gptq.zero(1, 0) << 4);
}
TEST(QuantizationPackings, Q10_SymmetricHasNoZeroPoints) {
  Source const s(true);
  Packed const p(s, 1);
  auto const gptq = read_gptq({.qweight = p.gptq, .qzeros = {}, .scales = s.scales_t, .g_idx = {}, .bits = 4, .group_size = 32}, kN, kK);
  EXPECT_EQ(gptq.dequantize(), s.dequantized);
  using Scheme = WNa16<4, 32>;
  std::vector<std::uint8_t> codes(kN * kK / 2);
  std::vector<float> scales(static_cast<std::size_t>(Scheme::weight_scale_count(kN, kK)));
  to_internal<Scheme>(gptq, codes.data(), scales.data());
  EXPECT_EQ(scales, s.scales);
  std::vector<float> row(kK);
  Scheme{}.dequantize_weight_row<float>(codes.data(), scales.data(), kN, kK, 3, row.data());
  EXPECT_EQ(row, std::vector<float>(s.dequantized.begin() + 3 * kK, s.dequantized.begin() + 4 * kK));
}
TEST(QuantizationPackings, Q10_EightBits) {
  Source const s(false, 8);
  Packed const p(s, 1, 8);
  auto const gptq =
      read_gptq({.qweight = p.gptq, .qzeros = p.gptq_zeros, .scales = s.scales_t, .g_idx = {}, .bits = 8, .group_size = 32}, kN, kK);
  auto const ct = read_compressed_tensors(
      {.weight_packed = p.ct, .weight_zero_point = p.ct_zeros, .weight_scale = s.scales, .bits = 8, .group_size = 32}, kN, kK);
  EXPECT_EQ(gptq.dequantize(), s.dequantized);
  EXPECT_EQ(ct.dequantize(), s.dequantized);
}
TEST(QuantizationPackings, Q11_GptqV1StoresZeroMinusOne) {
  Source const s(false);
  Packed const v1(s, 1), v2(s, 0);
  GptqTensors t{.qweight = v1.gptq, .qzeros = v1.gptq_zeros, .scales = s.scales_t, .g_idx = {}, .bits = 4, .group_size = 32};
  EXPECT_EQ(read_gptq(t, kN, kK).dequantize(), s.dequantized);
  t.qzeros = v2.gptq_zeros;
  EXPECT_NE(read_gptq(t, kN, kK).dequantize(), s.dequantized);
  t.zeros_minus_one = false;
  EXPECT_EQ(read_gptq(t, kN, kK).dequantize(), s.dequantized);
}
TEST(QuantizationPackings, ActivationOrderIsRefused) {
  Source const s(true);
  Packed const p(s, 1);
  std::vector<std::int32_t> g_idx(kK);
  for (std::size_t k = 0; k < kK; ++k) g_idx[k] = static_cast<std::int32_t>(k / kGroup);
  GptqTensors const t{.qweight = p.gptq, .qzeros = {}, .scales = s.scales_t, .g_idx = g_idx, .bits = 4, .group_size = 32};
  EXPECT_EQ(read_gptq(t, kN, kK).dequantize(), s.dequantized);
  g_idx[5] = 1;
  EXPECT_EQ(what_of([&] { read_gptq(t, kN, kK); }), "E_UNSUPPORTED: desc_act: g_idx[5] is 1, only 0 = k / group is supported");
}
TEST(QuantizationPackings, WrongSizesAreNamed) {
  Source const s(true);
  Packed const p(s, 1);
  EXPECT_EQ(what_of([&] { read_awq({.qweight = p.awq, .qzeros = {}, .scales = s.scales, .bits = 4, .group_size = 64}, kN, kK); }),
            "E_ARG: scales has 32 elements, expected 16");
  EXPECT_EQ(what_of([&] { read_awq({.qweight = p.awq, .qzeros = {}, .scales = s.scales, .bits = 8, .group_size = 32}, kN, kK); }),
            "E_CONFIG: AWQ weights are 4 bit, got 8 bits");
  EXPECT_EQ(what_of([&] {
              read_compressed_tensors(
                  {.weight_packed = p.ct, .weight_zero_point = {}, .weight_scale = s.scales, .bits = 4, .group_size = 128}, kN, kK);
            }),
            "E_CONFIG: packed weight [16, 64]: K must be a positive multiple of the group size 128 and of 8 codes a word");
}

}  // namespace
