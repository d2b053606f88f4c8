// SPDX-License-Identifier: Apache-2.0
// tests/golden/quantization_formats_test.cpp: value tables and casts, against torch's and ml_dtypes' own.
#include "moe/quantization/format/formats.hpp"

#include <gtest/gtest.h>

#include "quantization_golden.hpp"

namespace {

using namespace moe::quantization;
using moe_test::quant_file;
using moe_test::same_bits;

template <class Decode>
std::vector<float> table(int codes, Decode decode) {
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(codes));
  for (int code = 0; code < codes; ++code) values.push_back(decode(static_cast<std::uint8_t>(code)));
  return values;
}

TEST(QuantizationTables, EveryCodeDecodesAsTorchDoes) {
  auto const file = quant_file("tables");
  EXPECT_TRUE(same_bits(table(256, decode_e4m3), file.read<float>("e4m3fn")));
  EXPECT_TRUE(same_bits(table(256, decode_e5m2), file.read<float>("e5m2")));
  EXPECT_TRUE(same_bits(table(256, decode_e4m3fnuz), file.read<float>("e4m3fnuz")));
  EXPECT_TRUE(same_bits(table(256, decode_e5m2fnuz), file.read<float>("e5m2fnuz")));
  EXPECT_TRUE(same_bits(table(256, decode_e8m0), file.read<float>("e8m0fnu")));
  EXPECT_TRUE(same_bits(table(16, decode_e2m1), file.read<float>("e2m1")));
}

/// Every bf16 pattern through a cast.
template <class Encode>
std::vector<std::uint8_t> from_bf16(Encode encode) {
  std::vector<std::uint8_t> codes;
  codes.reserve(65536);
  for (std::uint32_t i = 0; i < 65536; ++i) codes.push_back(encode(bits_float(i << 16)));
  return codes;
}

TEST(QuantizationCasts, EveryBf16PatternIsCastAsTorchDoes) {
  auto const file = quant_file("casts");
  EXPECT_TRUE(same_bits(from_bf16([](float v) { return encode_e4m3(v, Overflow::ieee); }), file.read<std::uint8_t>("e4m3fn_from_bf16")));
  EXPECT_TRUE(same_bits(from_bf16([](float v) { return encode_e4m3(v); }), file.read<std::uint8_t>("e4m3fn_sat448_from_bf16")));
  EXPECT_TRUE(same_bits(from_bf16([](float v) { return encode_e5m2(v, Overflow::ieee); }), file.read<std::uint8_t>("e5m2_from_bf16")));
}

TEST(QuantizationCasts, EveryBf16NumberIsCastToE2m1AsMlDtypesDoes) {
  auto const got = from_bf16(encode_e2m1);
  auto const want = quant_file("casts").read<std::uint8_t>("e2m1_from_bf16");
  for (std::uint32_t i = 0; i < 65536; ++i) {
    if ((i & 0x7FFFU) > 0x7F80U) continue;  // NaN has no e2m1 code
    ASSERT_EQ(+got[i], +want[i]) << "bf16 pattern " << i;
  }
}

TEST(QuantizationCasts, MidpointsAndTheirNeighbours) {
  auto const file = quant_file("casts");
  auto const in = file.read<float>("f32_in");
  auto const e4m3_codes = file.read<std::uint8_t>("f32_to_e4m3fn");
  auto const e5m2_codes = file.read<std::uint8_t>("f32_to_e5m2");
  auto const e2m1_codes = file.read<std::uint8_t>("f32_to_e2m1");
  for (std::size_t i = 0; i < in.size(); ++i) {
    ASSERT_EQ(+encode_e4m3(in[i], Overflow::ieee), +e4m3_codes[i]) << in[i];
    ASSERT_EQ(+encode_e5m2(in[i], Overflow::ieee), +e5m2_codes[i]) << in[i];
    if (!std::isnan(in[i])) {
      ASSERT_EQ(+encode_e2m1(in[i]), +e2m1_codes[i]) << in[i];
    }
  }
}

}  // namespace
