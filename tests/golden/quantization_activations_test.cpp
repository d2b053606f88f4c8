// SPDX-License-Identifier: Apache-2.0
// tests/golden/quantization_activations_test.cpp: fp8 and int8 activations, codes, scales and values bit for bit.
#include "moe/quantization/fp8_group128.hpp"

#include <gtest/gtest.h>

#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_tensor.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int8_per_token.hpp"
#include "quantization_golden.hpp"

namespace {

using namespace moe::quantization;
using moe_test::quant_file;
using moe_test::QuantizedMatrix;
using moe_test::same_bits;

constexpr std::int64_t kRows = 37;
constexpr std::int64_t kCols = 512;

/// The file for activations of type Act; the bf16 file holds no dq.
template <class Act>
char const* activation_file() {
  return std::is_same_v<Act, float> ? "act_f32_seed2001" : "act_bf16_seed2001";
}
template <class Act>
moe::io::SafetensorsFile activations() {
  return quant_file(activation_file<Act>());
}

template <class Act, class Scheme>
void compare(Scheme const& scheme, std::string const& prefix) {
  SCOPED_TRACE(prefix);
  auto const file = activations<Act>();
  QuantizedMatrix<Scheme> const got(scheme, file.template read<Act>("x"), kRows, kCols);
  EXPECT_TRUE(same_bits(got.q, file.template read<typename QuantizedMatrix<Scheme>::Code>(prefix + ".q")));
  if constexpr (std::is_same_v<typename Scheme::Scale, float>) {
    EXPECT_TRUE(same_bits(got.scale, file.template read<float>(prefix + ".scale")));
  } else {
    EXPECT_TRUE(same_bits(got.scale, file.template read<std::uint8_t>(prefix + ".scale_byte")));
  }
  if (file.find(prefix + ".dq") != nullptr) {
    EXPECT_TRUE(same_bits(got.dq, file.template read<float>(prefix + ".dq")));
  }
}

template <class Act>
class QuantizationActivations : public testing::Test {
 protected:
  void SetUp() override {
    if (!moe_test::has_quant_file(activation_file<Act>())) GTEST_SKIP() << activation_file<Act>() << " is only in the whole reference set";
  }
};
using Acts = testing::Types<float, moe::bf16>;
TYPED_TEST_SUITE(QuantizationActivations, Acts);

TYPED_TEST(QuantizationActivations, PerToken) {
  compare<TypeParam>(Fp8PerToken<>{}, "per_token");
  compare<TypeParam>(Fp8PerToken<ScaleFloor::amax_1e10, ScaleFormat::ue8m0>{}, "per_token_ue8m0");
  compare<TypeParam>(Fp8PerToken<ScaleFloor::amax_1e10, ScaleFormat::f32_pow2>{}, "per_token_ue8m0");
}

TYPED_TEST(QuantizationActivations, Group128) {
  compare<TypeParam>(Fp8Group<128>{}, "group128");
  compare<TypeParam>(Fp8Block<128>{}, "group128");
  compare<TypeParam>(Fp8Group<128, ScaleFormat::ue8m0>{}, "group128_ue8m0");
  compare<TypeParam>(Fp8Block<128, ScaleFormat::f32_pow2>{}, "group128_ue8m0");
}

TYPED_TEST(QuantizationActivations, Int8PerToken) { compare<TypeParam>(Int8PerToken{}, "int8_per_token"); }

TYPED_TEST(QuantizationActivations, PerTensor) {
  auto const file = activations<TypeParam>();
  auto const x = file.template read<TypeParam>("x");
  auto const used = file.template read<std::int32_t>("per_tensor.rows");
  std::vector<TypeParam> rows;
  for (std::int32_t const r : used) rows.insert(rows.end(), x.begin() + r * kCols, x.begin() + (r + 1) * kCols);
  auto const count = static_cast<std::int64_t>(used.size());
  std::vector<std::uint8_t> q(rows.size());
  float const scale = quantize_tensor(Fp8Codec<>{}, rows.data(), count, kCols, kCols, q.data());
  EXPECT_EQ(scale, file.template read<float>("per_tensor.scale").at(0));
  EXPECT_TRUE(same_bits(q, file.template read<std::uint8_t>("per_tensor.q")));
  // The static policy with that scale gives the same codes.
  QuantizedMatrix<Fp8PerTensorStatic> const got(Fp8PerTensorStatic({.scale = scale}), rows, count, kCols);
  EXPECT_TRUE(same_bits(got.q, q));
  if (file.find("per_tensor.dq") != nullptr) {
    EXPECT_TRUE(same_bits(got.dq, file.template read<float>("per_tensor.dq")));
  }
}

}  // namespace
