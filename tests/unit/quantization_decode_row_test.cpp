// SPDX-License-Identifier: Apache-2.0
// tests/unit/quantization_decode_row_test.cpp: rows of codes as the host decodes them, against each code's value: every code under every
// scale, both ways to read 4-bit codes, groups of any size.
#include "moe/quantization/format/decode_row.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "moe/quantization/format/block_weights.hpp"

namespace {

using namespace moe;
using namespace moe::quantization;

/// The same value, the sign of zero included, or both NaN.
bool same(float a, float b) { return (std::isnan(a) && std::isnan(b)) || float_bits(a) == float_bits(b); }

/// The bytes of `n` columns: every code is at every place of a word in some row.
template <class Codec>
std::vector<typename Codec::Code> row_of(std::int64_t n, int row) {
  std::vector<typename Codec::Code> codes(static_cast<std::size_t>((n + Codec::kPack - 1) / Codec::kPack));
  for (std::size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<typename Codec::Code>(i * 37 + static_cast<std::size_t>(row));
  return codes;
}

/// Both ways to read `n` codes under one scale.
template <class Codec>
void expect_values(Codec const& codec, std::int64_t n, int row, typename Codec::Scale scale) {
  auto const codes = row_of<Codec>(n, row);
  auto const factor = codec.factor(scale);
  std::vector<float> shifted(static_cast<std::size_t>(n)), looked_up(shifted);
  quantization::detail::decode_nibbles<true>(codec, codes.data(), factor, n, shifted.data());
  quantization::detail::decode_nibbles<false>(codec, codes.data(), factor, n, looked_up.data());
  for (std::int64_t c = 0; c < n; ++c) {
    float const want = codec.decode(quantization::detail::load_code<Codec>(codes.data(), c), factor);
    ASSERT_TRUE(same(shifted[static_cast<std::size_t>(c)], want)) << "column " << c << " of " << n << ", row " << row;
    ASSERT_TRUE(same(looked_up[static_cast<std::size_t>(c)], want)) << "column " << c << " of " << n << ", row " << row;
  }
}

/// Scales of floats: ordinary, subnormal, so large that codes overflow, not finite.
constexpr float kFactors[] = {1.0F, 0.3F, -2.5F, 0.0F, 1e-45F, 3e-39F, 1e-38F, 3e38F, INFINITY, NAN};

TEST(DecodeRow, EveryCodeUnderEveryScale) {
  for (int row = 0; row < 256; ++row) {
    for (int scale = 0; scale < 256; ++scale) {
      expect_values(Mxfp4Codec<MxRule::ocp>{}, 32, row, static_cast<std::uint8_t>(scale));
    }
    for (float const global : kFactors) {
      for (int scale = 0; scale < 256; scale += 5) {
        expect_values(Nvfp4Codec{global}, 16, row, static_cast<std::uint8_t>(scale));
      }
      expect_values(OffsetIntCodec<4>{}, 128, row, global);
      for (float const zero : {0.0F, 8.0F, 7.25F, 15.0F}) expect_values(ZeroPointCodec<4>{}, 32, row, ScaleZero{global, zero});
    }
  }
}

TEST(DecodeRow, AnyNumberOfCodes) {
  for (std::int64_t n = 1; n < 70; ++n) {
    for (int row = 0; row < 16; ++row) expect_values(Mxfp4Codec<MxRule::ocp>{}, n, row * 17, 126);
  }
}

/// A whole row against its codes one by one.
template <class Codec, class Scale>
void expect_row(Codec const& codec, std::int64_t cols, std::int64_t group, std::vector<Scale> const& scales) {
  auto const codes = row_of<Codec>(cols, 3);
  std::vector<float> row(static_cast<std::size_t>(cols));
  quantization::detail::dequantize_block_row(codec, codes.data(), scales.data(), cols, group, row.data());
  for (std::int64_t c = 0; c < cols; ++c) {
    float const want =
        codec.decode(quantization::detail::load_code<Codec>(codes.data(), c), codec.factor(scales[static_cast<std::size_t>(c / group)]));
    ASSERT_TRUE(same(row[static_cast<std::size_t>(c)], want)) << "column " << c << " of " << cols << ", groups of " << group;
  }
}

TEST(DecodeRow, EachGroupHasItsScale) {
  std::vector<std::uint8_t> const bytes = {120, 255, 0, 254, 130, 119, 1, 128, 60, 90, 100, 110};
  std::vector<float> const floats = {1.0F, -3.0F, NAN, 1e-40F, 7.5F, 2e38F, 0.1F, 0.2F, 0.3F, 0.4F, 0.5F, 0.6F};
  for (std::int64_t const cols : {1, 7, 31, 32, 40, 96, 100}) {
    for (std::int64_t const group : {9, 16, 32, 64, 100}) {  // 9: a group begins inside a byte
      expect_row(Mxfp4Codec<MxRule::ceil>{}, cols, group, bytes);
      expect_row(Nvfp4Codec{0.37F}, cols, group, bytes);
      expect_row(OffsetIntCodec<4>{}, cols, group, floats);
      expect_row(OffsetIntCodec<8>{}, cols, group, floats);
      expect_row(Fp8Codec<>{}, cols, group, floats);
      expect_row(Int8Codec{}, cols, group, floats);
      expect_row(Mxfp8Codec<MxRule::ceil>{}, cols, group, bytes);
    }
  }
}

}  // namespace
