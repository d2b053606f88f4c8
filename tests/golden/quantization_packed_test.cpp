// SPDX-License-Identifier: Apache-2.0
// tests/golden/quantization_packed_test.cpp: the 4-bit schemes: int4 groups, mxfp4, nvfp4, bit for bit.
#include "moe/quantization/mxfp4.hpp"

#include <gtest/gtest.h>

#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "quantization_golden.hpp"

namespace {

using namespace moe::quantization;
using moe_test::quant_file;
using moe_test::QuantizedMatrix;
using moe_test::QuantizedWeight;
using moe_test::same_bits;

/// Codes of packed rows, one per byte.
std::vector<std::uint8_t> unpack(std::vector<std::uint8_t> const& packed) {
  std::vector<std::uint8_t> codes;
  for (std::size_t i = 0; i < 2 * packed.size(); ++i) codes.push_back(nibble(packed.data(), static_cast<std::int64_t>(i)));
  return codes;
}

TEST(QuantizationInt4, Group128) {
  auto const file = quant_file("weight_int4_g128_64x512_seed2021");
  QuantizedWeight<Int4Group128> const got({}, file.read<float>("w"), 64, 512);
  EXPECT_TRUE(same_bits(got.q, file.read<std::uint8_t>("packed_offset8")));
  EXPECT_TRUE(same_bits(got.scale, file.read<float>("scale")));
  // The file's dq keeps the sign of values that round to zero, which an integer code cannot: equal as numbers.
  EXPECT_EQ(got.dq, file.read<float>("dq"));
  std::vector<std::int8_t> q;
  for (std::uint8_t const code : unpack(got.q)) q.push_back(static_cast<std::int8_t>(code - 8));
  EXPECT_TRUE(same_bits(q, file.read<std::int8_t>("q")));
  QuantizedWeight<Int4Group128Zero> const zero({}, file.read<float>("w"), 64, 512);
  EXPECT_TRUE(same_bits(zero.q, got.q));
  EXPECT_TRUE(same_bits(zero.dq, got.dq));
}

TEST(QuantizationMxfp4, QuantizesByTheOcpRule) {
  auto const file = quant_file("mxfp4_quant_ocp_seed2031");
  auto const x = file.read<float>("x");
  QuantizedWeight<Mxfp4<>> const weight({}, x, 24, 256);
  QuantizedMatrix<Mxfp4<MxRule::ocp>> const rows({}, x, 24, 256);
  for (auto const* q : {&weight.q, &rows.q}) {
    EXPECT_TRUE(same_bits(*q, file.read<std::uint8_t>("packed")));
    EXPECT_TRUE(same_bits(unpack(*q), file.read<std::uint8_t>("codes")));
  }
  EXPECT_TRUE(same_bits(weight.scale, file.read<std::uint8_t>("scale_byte")));
  EXPECT_TRUE(same_bits(rows.scale, file.read<std::uint8_t>("scale_byte")));
  EXPECT_TRUE(same_bits(weight.dq, file.read<float>("dq")));
  EXPECT_TRUE(same_bits(rows.dq, file.read<float>("dq")));
}

TEST(QuantizationMxfp4, DequantizesAsTransformersDoes) {
  auto const file = quant_file("mxfp4_dequant_seed2031");
  constexpr std::int64_t kExperts = 3, kRows = 20, kCols = 128;
  auto const blocks = file.read<std::uint8_t>("blocks");
  auto const scales = file.read<std::uint8_t>("scales");
  std::vector<float> transposed(kExperts * kCols * kRows);
  std::vector<float> row(kCols);
  for (std::int64_t e = 0; e < kExperts; ++e) {
    for (std::int64_t r = 0; r < kRows; ++r) {
      Mxfp4W4A16<>{}.dequantize_weight_row<float>(blocks.data() + e * kRows * kCols / 2, scales.data() + e * kRows * kCols / 32, kRows,
                                                  kCols, r, row.data());
      for (std::int64_t c = 0; c < kCols; ++c)
        transposed[static_cast<std::size_t>((e * kCols + c) * kRows + r)] = row[static_cast<std::size_t>(c)];
    }
  }
  EXPECT_TRUE(same_bits(transposed, file.read<float>("dequant_f32")));
  EXPECT_TRUE(same_bits(transposed, file.read<float>("dequant_bf16")));
}

TEST(QuantizationNvfp4, TwoLevelScales) {
  auto const file = quant_file("nvfp4_seed2041");
  auto const w = file.read<float>("w");
  QuantizedWeight<Nvfp4> const weight({}, w, 40, 256);
  float const global = file.read<float>("global_scale").at(0);
  EXPECT_EQ(Nvfp4::weight_global(weight.scale.data(), 40, 256), global);
  QuantizedMatrix<Nvfp4> const rows(Nvfp4({.global_scale = global}), w, 40, 256);
  std::vector<std::uint8_t> const block_scales(weight.scale.begin(), weight.scale.begin() + 40 * 16);
  for (auto const* q : {&weight.q, &rows.q}) {
    EXPECT_TRUE(same_bits(*q, file.read<std::uint8_t>("packed")));
    EXPECT_TRUE(same_bits(unpack(*q), file.read<std::uint8_t>("codes")));
  }
  EXPECT_TRUE(same_bits(block_scales, file.read<std::uint8_t>("block_scale_e4m3")));
  EXPECT_TRUE(same_bits(rows.scale, block_scales));
  EXPECT_TRUE(same_bits(weight.dq, file.read<float>("dq")));
  EXPECT_TRUE(same_bits(rows.dq, file.read<float>("dq")));
}

}  // namespace
