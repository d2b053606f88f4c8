// SPDX-License-Identifier: Apache-2.0
// tests/unit/quantization_schemes_test.cpp: rows and weights through every scheme: docs/semantics/quantization.md §13, Q1–Q7, Q14, Q15,
// Q19, and the invariants.
#include "moe/quantization/rows/apply.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "moe/core/contract/concepts.hpp"
#include "moe/quantization/format/facts.hpp"
#include "moe/quantization/schemes.hpp"

namespace {

using namespace moe::quantization;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

template <class Scheme>
struct Row {
  std::vector<typename Scheme::template Payload<float>> q;
  std::vector<typename Scheme::Scale> s;
  std::vector<float> dq;

  Row(Scheme const& scheme, std::vector<float> const& x)
      : q(static_cast<std::size_t>(Scheme::payload_cols(std::ssize(x)))),
        s(static_cast<std::size_t>(Scheme::scale_cols(std::ssize(x)))),
        dq(x.size()) {
    scheme.template quantize_row<float>(x.data(), std::ssize(x), q.data(), s.data());
    scheme.template dequantize_row<float>(q.data(), s.data(), std::ssize(x), dq.data());
  }
};

std::vector<float> values_e4m3(std::vector<std::uint8_t> const& codes) {
  std::vector<float> out;
  for (auto const c : codes) out.push_back(decode_e4m3(c));
  return out;
}
std::vector<float> values_e2m1(std::vector<std::uint8_t> const& packed, std::size_t n) {
  std::vector<float> out;
  for (std::size_t i = 0; i < n; ++i) out.push_back(decode_e2m1(nibble(packed.data(), static_cast<std::int64_t>(i))));
  return out;
}
void expect_near(std::vector<float> const& got, std::vector<float> const& want, float tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << i;
}

std::vector<float> const kExample{0.1F, -0.7F, 1.3F, 2.9F};

TEST(QuantizationExamples, Q1_Fp8Dynamic) {
  Row const row(Fp8PerToken<>{}, kExample);
  EXPECT_NEAR(row.s[0], 0.00647321F, 1e-8F);
  EXPECT_EQ(values_e4m3(row.q), (std::vector<float>{15, -112, 208, 448}));
  expect_near(row.dq, {.097098F, -.725F, 1.346429F, 2.9F}, 1e-6F);
}
TEST(QuantizationExamples, Q1_Fp8Ue8m0) {
  Row const row(Fp8Group<128, ScaleFormat::ue8m0>{}, kExample);
  EXPECT_EQ(+row.s[0], 120);
  EXPECT_EQ(values_e4m3(row.q), (std::vector<float>{13, -88, 160, 384}));
  EXPECT_EQ(row.dq, (std::vector<float>{.1015625F, -.6875F, 1.25F, 3.0F}));
}
TEST(QuantizationExamples, Q1_Int8) {
  Row const row(Int8PerToken{}, kExample);
  EXPECT_NEAR(row.s[0], 0.02283465F, 1e-8F);
  EXPECT_EQ(row.q, (std::vector<std::int8_t>{4, -31, 57, 127}));
  expect_near(row.dq, {.091339F, -.707874F, 1.301575F, 2.9F}, 1e-6F);
}
TEST(QuantizationExamples, Q1_Mxfp4Ocp) {
  Row const row(Mxfp4<MxRule::ocp>{}, kExample);
  EXPECT_EQ(+row.s[0], 126);
  EXPECT_EQ(values_e2m1(row.q, 4), (std::vector<float>{0, -1.5F, 3, 6}));
  EXPECT_EQ(row.dq, (std::vector<float>{0, -.75F, 1.5F, 3}));
}
TEST(QuantizationExamples, Q1_Nvfp4TwoBlocks) {
  std::vector<float> x(20, 0.0F);
  std::copy(kExample.begin(), kExample.end(), x.begin());
  x[16] = .02F, x[17] = -.05F, x[18] = .11F;
  Row const row(Nvfp4({.global_scale = 1.0F / 926.896552F}), x);
  EXPECT_EQ(decode_e4m3(row.s[0]), 448.0F);
  EXPECT_EQ(decode_e4m3(row.s[1]), 16.0F);
  auto const codes = values_e2m1(row.q, 20);
  EXPECT_EQ(std::vector<float>(codes.begin(), codes.begin() + 4), (std::vector<float>{0, -1.5F, 3, 6}));
  EXPECT_EQ(std::vector<float>(codes.begin() + 16, codes.end()), (std::vector<float>{1, -3, 6, 0}));
  expect_near({row.dq.begin(), row.dq.begin() + 4}, {0, -.725F, 1.45F, 2.9F}, 1e-5F);
  expect_near({row.dq.begin() + 16, row.dq.end()}, {.017262F, -.051786F, .103571F, 0}, 1e-6F);
}

template <class Scheme>
class QuantizationSchemes : public testing::Test {};
using Schemes =
    testing::Types<None, Fp8PerTensor<>, Fp8PerTensorStatic, Fp8PerToken<>, Fp8PerToken<ScaleFloor::min_scale>,
                   Fp8PerToken<ScaleFloor::amax_1e10, ScaleFormat::ue8m0>, Fp8PerChannel<>, Fp8Group<>, Fp8Group<128, ScaleFormat::ue8m0>,
                   Fp8Block<>, Fp8Block<128, ScaleFormat::ue8m0>, Fp8Block<128, ScaleFormat::f32_pow2, ScaleFloor::amax_1e4>, Int8PerToken,
                   Int8PerTensorStatic, Int8PerChannel, Int8Group<>, Int4Group128, Int4Group128Zero, WNa16<8, 128>, WNa16<4, 0>, W4A8Fp8,
                   W4A8Int8, Mxfp8<>, Mxfp8W8A16<>, Mxfp4<>, Mxfp4<MxRule::even>, Mxfp4W4A8<>, Mxfp4W4A16<>, Nvfp4, Nvfp4W4A16, Int4Fp8<>,
                   Int4Fp8<32, true>>;
TYPED_TEST_SUITE(QuantizationSchemes, Schemes);

template <class Scale>
bool is_finite_scale(Scale s) {
  if constexpr (std::is_same_v<Scale, float>) {
    return std::isfinite(s) && s > 0;
  } else {
    return s != 0xFF;
  }
}

TYPED_TEST(QuantizationSchemes, ModelsTheConcept) {
  static_assert(moe::facts::states_format<TypeParam>());
  static_assert(moe::Quantization<TypeParam>);
  static_assert(TypeParam::supports(256, 512));
  EXPECT_EQ(shape_violation<TypeParam>(256, 512), "");
  EXPECT_STRNE(TypeParam::kName, "");
}

TYPED_TEST(QuantizationSchemes, Q2_ZeroRowsGiveZeroAndAFiniteScale) {
  std::vector<float> const x(256, 0.0F);
  Row const row(TypeParam{}, x);
  EXPECT_EQ(row.dq, x);
  for (auto const s : row.s) EXPECT_TRUE(is_finite_scale(s)) << +s;

  std::vector<typename TypeParam::template WeightCode<float>> codes(static_cast<std::size_t>(16 * TypeParam::weight_code_cols(256)));
  std::vector<typename TypeParam::WeightScale> scales(static_cast<std::size_t>(TypeParam::weight_scale_count(16, 256)));
  std::vector<float> const w(16 * 256, 0.0F);
  std::vector<float> out(256, 1.0F);
  TypeParam{}.template quantize_weight<float>(w.data(), 16, 256, codes.data(), scales.data());
  TypeParam{}.template dequantize_weight_row<float>(codes.data(), scales.data(), 16, 256, 9, out.data());
  EXPECT_EQ(out, x);
}

TYPED_TEST(QuantizationSchemes, Invariant_RowsAreCloseAndIdempotent) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> x(384);
  for (float& v : x) v = normal(random);
  Row const row(TypeParam{}, x);
  // Within the format's resolution: two significand bits in e2m1, four in e4m3, 1 / 127 of the largest in int8.
  float const relative = TypeParam::kPayloadPack == 2 ? 0.25F : 0.0625F;
  for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(row.dq[i], x[i], relative * std::abs(x[i]) + 0.51F) << i;
  Row const again(TypeParam{}, row.dq);
  if constexpr (!std::is_same_v<TypeParam, Nvfp4>) {  // its block scale is rounded and may change
    for (std::size_t i = 0; i < x.size(); ++i) EXPECT_NEAR(again.dq[i], row.dq[i], 1e-5F * std::abs(row.dq[i])) << i;
  }
}

TYPED_TEST(QuantizationSchemes, Invariant_WeightsAreClose) {
  if constexpr (TypeParam::kWeightPack >= 1) {
    constexpr std::int64_t kRows = 40, kCols = 384;
    std::mt19937 random(8);
    std::normal_distribution<float> normal;
    std::vector<float> w(kRows * kCols);
    for (float& v : w) v = normal(random);
    std::vector<typename TypeParam::template WeightCode<float>> codes(static_cast<std::size_t>(kRows * TypeParam::weight_code_cols(kCols)));
    std::vector<typename TypeParam::WeightScale> scales(static_cast<std::size_t>(TypeParam::weight_scale_count(kRows, kCols)));
    TypeParam{}.template quantize_weight<float>(w.data(), kRows, kCols, codes.data(), scales.data());
    std::vector<float> out(kCols);
    double error = 0, norm = 0;
    for (std::int64_t r = 0; r < kRows; ++r) {
      TypeParam{}.template dequantize_weight_row<float>(codes.data(), scales.data(), kRows, kCols, r, out.data());
      for (std::int64_t c = 0; c < kCols; ++c) {
        double const x = w[static_cast<std::size_t>(r * kCols + c)];
        error += (out[static_cast<std::size_t>(c)] - x) * (out[static_cast<std::size_t>(c)] - x);
        norm += x * x;
      }
    }
    EXPECT_LT(std::sqrt(error / norm), TypeParam::kWeightPack == 2 ? 0.2 : 0.04);
  }
}

TYPED_TEST(QuantizationSchemes, Q19_NoRows) {
  std::vector<float> nothing;
  moe::Rows<float const> const x = moe::make_rows<moe::dynamic>(static_cast<float const*>(nullptr), 0, 256);
  auto const q =
      moe::make_rows<moe::dynamic>(static_cast<typename TypeParam::template Payload<float>*>(nullptr), 0, TypeParam::payload_cols(256));
  auto const s = moe::make_rows<moe::dynamic>(static_cast<typename TypeParam::Scale*>(nullptr), 0, TypeParam::scale_cols(256));
  quantize_rows(TypeParam{}, x, q, s);
  auto const wrong = moe::make_rows<moe::dynamic>(static_cast<typename TypeParam::template Payload<float>*>(nullptr), 0, 7);
  EXPECT_THROW(quantize_rows(TypeParam{}, x, wrong, s), moe::Error);
}

/// Error of fp8 with a scale s: half a unit in the last place of the value, or of the subnormals.
TEST(QuantizationInvariants, Fp8ErrorBound) {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  std::vector<float> x(512);
  for (float& v : x) v = normal(random) * std::exp(4 * normal(random));
  Row const row(Fp8Group<>{}, x);
  for (std::size_t i = 0; i < x.size(); ++i) {
    float const s = row.s[i / 128], error = std::abs(row.dq[i] - x[i]);
    EXPECT_LE(error, std::abs(x[i]) >= s * 0x1p-6F ? 0x1p-4F * std::abs(x[i]) : s * 0x1p-10F * 1.0001F) << x[i];
  }
}
TEST(QuantizationInvariants, Int8AndE2m1ErrorBounds) {
  std::mt19937 random(10);
  std::normal_distribution<float> normal;
  std::vector<float> x(512);
  for (float& v : x) v = normal(random);
  Row const bytes(Int8Group<>{}, x);
  Row const nibbles(Mxfp4<>{}, x);
  for (std::size_t i = 0; i < x.size(); ++i) {
    EXPECT_LE(std::abs(bytes.dq[i] - x[i]), bytes.s[i / 128] * 0.50001F);
    float const s = decode_e8m0(nibbles.s[i / 32]);
    EXPECT_LE(std::abs(nibbles.dq[i] - x[i]), std::abs(x[i]) >= s ? 0.25F * std::abs(x[i]) : s / 4) << x[i] << " scale " << s;
  }
}

TEST(QuantizationSaturation, Q3_StaticScaleSaturatesAndFlushes) {
  float const s = 0.5F;
  Row const row(Fp8PerTensorStatic({.scale = s}), {448 * s, -448 * s, 1e30F, -kInf, 1e-40F, -1e-40F, kNan});
  EXPECT_EQ(std::vector<std::uint8_t>(row.q.begin(), row.q.end()), (std::vector<std::uint8_t>{0x7E, 0xFE, 0x7E, 0xFE, 0x00, 0x80, 0x7F}));
  Row const bytes(Int8PerTensorStatic({.scale = s}), {1e30F, -kInf, 1e-40F, kNan});
  EXPECT_EQ(bytes.q, (std::vector<std::int8_t>{127, -127, 0, 0}));
}
TEST(QuantizationSaturation, Q3_SubnormalInputsMeetTheFloor) {
  std::vector<float> const tiny(128, 1e-40F);
  EXPECT_EQ(Row(Fp8PerToken<ScaleFloor::min_scale>{}, tiny).s[0], 1.0F / (448 * 512));
  EXPECT_NEAR((Row(Fp8PerToken<ScaleFloor::min_scale>{}, tiny).s[0]), 4.359654e-6F, 1e-12F);
  EXPECT_EQ(Row(Fp8Group<>{}, tiny).s[0], 1e-10F / 448);
  EXPECT_EQ((Row(Fp8Block<128, ScaleFormat::f32, ScaleFloor::amax_1e4>{}, tiny).s[0]), 1e-4F / 448);
  EXPECT_EQ(Row(Fp8Group<>{}, tiny).dq, std::vector<float>(128, 0.0F));
  EXPECT_EQ(+Row(Mxfp8<>{}, tiny).s[0], 0);
}
TEST(QuantizationSaturation, UpperBoundCutsOutliersOfARow) {
  Row const row(Fp8PerToken<>({.amax_upper_bound = 4.48F}), {1.0F, -2.0F, 100.0F});
  EXPECT_EQ(row.s[0], 4.48F / 448);
  EXPECT_EQ(row.dq[2], 448 * row.s[0]);
  EXPECT_TRUE(std::isnan(Row(Fp8PerToken<>({.amax_upper_bound = 1.0F}), {1.0F, kNan}).s[0]));
}

TEST(QuantizationFormats, Q4_E4m3TiesGoToEven) {
  EXPECT_EQ(decode_e4m3(encode_e4m3(17.0F)), 16.0F);
  EXPECT_EQ(decode_e4m3(encode_e4m3(19.0F)), 20.0F);
  EXPECT_EQ(decode_e4m3(encode_e4m3(-17.0F)), -16.0F);
  EXPECT_EQ(+encode_e4m3(464.0F), 0x7E);
  EXPECT_EQ(+encode_e4m3(1e30F), 0x7E);
  EXPECT_EQ(+encode_e4m3(1e30F, Overflow::ieee), 0x7F);
  EXPECT_EQ(decode_e5m2(encode_e5m2(kInf)), 57344.0F);
}
TEST(QuantizationFormats, Q5_E2m1Thresholds) {
  std::vector<float> got;
  for (float const v : {.25F, .75F, 1.25F, 1.75F, 2.5F, 3.5F, 5.0F, 5.01F}) got.push_back(decode_e2m1(encode_e2m1(v)));
  EXPECT_EQ(got, (std::vector<float>{0, 1, 1, 2, 2, 4, 4, 6}));
}
TEST(QuantizationFormats, EveryCodeSurvivesARoundTrip) {
  for (int c = 0; c < 256; ++c) {
    auto const code = static_cast<std::uint8_t>(c);
    EXPECT_EQ(+encode_e4m3(decode_e4m3(code)), c);
    if ((c & 0x7F) <= 0x7B) {
      EXPECT_EQ(+encode_e5m2(decode_e5m2(code)), c);
    }
    if (c < 16) {
      EXPECT_EQ(+encode_e2m1(decode_e2m1(code)), c);
    }
    if (c < 255) {
      EXPECT_EQ(+ceil_e8m0(decode_e8m0(code)), c);
    }
  }
  for (int v = -127; v <= 127; ++v) EXPECT_EQ(+encode_int8(static_cast<float>(v)), v);
  EXPECT_EQ(+encode_int8(-128.0F), -127);
  EXPECT_EQ(+encode_int8(2.5F), 2);
}

TEST(QuantizationMx, Q6_CeilIsExactAtPowersOfTwo) {
  for (int n = -100; n <= 100; n += 10) {
    float const top8 = std::ldexp(448.0F, n), top4 = std::ldexp(6.0F, n);
    EXPECT_EQ((+mx_exponent<MxRule::ceil, 3, 8>(float_bits(top8))), 127 + n);
    EXPECT_EQ((+mx_exponent<MxRule::ceil, 3, 8>(float_bits(top8) + 1)), 128 + n);
    EXPECT_EQ((+mx_exponent<MxRule::ceil, 3, 8>(float_bits(top8) - 1)), 127 + n);
    EXPECT_EQ((+mx_exponent<MxRule::ceil, 1, 2>(float_bits(top4))), 127 + n);
    EXPECT_EQ((+mx_exponent<MxRule::ceil, 1, 2>(float_bits(top4) + 1)), 128 + n);
    EXPECT_EQ((+ceil_e8m0(std::ldexp(1.0F, n))), 127 + n);
    EXPECT_EQ((+ceil_e8m0(bits_float(float_bits(std::ldexp(1.0F, n)) + 1))), 128 + n);
  }
}
TEST(QuantizationMx, Q6_OtherRulesAndClamps) {
  EXPECT_EQ((+mx_exponent<MxRule::ocp, 1, 2>(float_bits(7.0F))), 127);   // 7 saturates to 6
  EXPECT_EQ((+mx_exponent<MxRule::even, 1, 2>(float_bits(7.0F))), 128);  // 7 rounds up to 8
  EXPECT_EQ((+mx_exponent<MxRule::even, 1, 2>(float_bits(6.9F))), 127);
  EXPECT_EQ((+mx_exponent<MxRule::ceil, 1, 2>(0)), 0);
  EXPECT_EQ((+mx_exponent<MxRule::ocp, 3, 8>(float_bits(1e-40F))), 0);
  EXPECT_EQ((+mx_exponent<MxRule::ceil, 3, 8>(float_bits(std::numeric_limits<float>::max()))), 247);
  EXPECT_EQ((+mx_exponent<MxRule::ceil, 3, 8>(kInfBits)), 255);
}

template <class Scheme>
void expect_only_group_is_nan(float bad, std::size_t group) {
  SCOPED_TRACE(Scheme::kName);
  std::vector<float> x(384, 1.0F);
  x[130] = bad;
  Row const row(Scheme{}, x);
  std::size_t const begin = 130 / group * group;
  for (std::size_t i = 0; i < x.size(); ++i) {
    bool const inside = i >= begin && i < begin + group;
    EXPECT_EQ(std::isnan(row.dq[i]), inside) << i;
    if (!inside) {
      EXPECT_NEAR(row.dq[i], 1.0F, 0.07F);
    }
  }
}
TEST(QuantizationNan, Q7_OnlyItsGroup) {
  for (float const bad : {kNan, kInf, -kInf}) {
    expect_only_group_is_nan<Fp8Group<>>(bad, 128);
    expect_only_group_is_nan<Fp8Block<128, ScaleFormat::ue8m0>>(bad, 128);
    expect_only_group_is_nan<Fp8PerToken<>>(bad, 384);
    expect_only_group_is_nan<Mxfp8<>>(bad, 32);
    expect_only_group_is_nan<Mxfp4<>>(bad, 32);
    expect_only_group_is_nan<Nvfp4>(bad, 16);
  }
}
TEST(QuantizationNan, Q7_Int8ClampsInfinityAndZeroesNan) {
  Row const row(Int8PerToken{}, {1.27F, kInf, -kInf, kNan, -0.635F});
  EXPECT_EQ(row.q, (std::vector<std::int8_t>{127, 127, -127, 0, -64}));
  Row const only(Int8PerToken{}, {kInf, 0.0F});
  EXPECT_EQ(only.q, (std::vector<std::int8_t>{127, 0}));
  EXPECT_GT(only.s[0], 0.0F);
}

TEST(QuantizationPerTensor, Q14_PaddingRowsDoNotEnterTheScale) {
  std::vector<float> x(4 * 8, 1.0F);
  for (std::size_t i = 16; i < x.size(); ++i) x[i] = 1e30F;  // two padding rows of garbage
  std::vector<std::uint8_t> q(16);
  EXPECT_EQ(quantize_tensor(Fp8Codec<>{}, x.data(), 2, 8, 8, q.data()), 1.0F / 448);
  EXPECT_EQ(quantize_tensor(Fp8Codec<ScaleFloor::min_scale>{}, x.data(), 0, 8, 8, q.data()), kMinScale);
}
TEST(QuantizationBatched, Q14_OnlyCountedRowsAreTouched) {
  constexpr std::int64_t kExperts = 2, kCapacity = 3, kHidden = 128;
  std::vector<float> x(kExperts * kCapacity * kHidden, kNan);
  for (std::int64_t i = 0; i < 2 * kHidden; ++i) x[static_cast<std::size_t>(i)] = 1.0F;
  std::vector<std::uint8_t> q(x.size(), 0xAB);
  std::vector<float> s(kExperts * kCapacity, -1.0F);
  std::vector<std::int32_t> counts{2, 0};
  auto const run = [&] {
    quantize_batched(Fp8Block<>{}, moe::make_blocks(static_cast<float const*>(x.data()), kExperts, kCapacity, kHidden), counts,
                     moe::make_blocks(q.data(), kExperts, kCapacity, kHidden), moe::make_blocks(s.data(), kExperts, kCapacity, 1));
  };
  run();
  EXPECT_EQ(s, (std::vector<float>{1.0F / 448, 1.0F / 448, -1, -1, -1, -1}));
  EXPECT_EQ(+q[2 * kHidden], 0xAB);
  counts[1] = 4;
  EXPECT_THROW(run(), moe::Error);
}

TEST(QuantizationInt8, Q15_RoundsAndNeverTruncates) {
  std::vector<float> x(128, 0.0F);
  x[0] = 127.0F;  // s = 1
  x[1] = 0.6F, x[2] = -0.6F, x[3] = 0.5F, x[4] = 1.5F;
  Row const row(Int8Group<>{}, x);
  EXPECT_EQ(std::vector<std::int8_t>(row.q.begin(), row.q.begin() + 5), (std::vector<std::int8_t>{127, 1, -1, 0, 2}));
}

TEST(QuantizationInt4, OffsetCodes) {
  // docs/semantics/quantization.md §5: codes 0, 3, 8, 15 with s = .25.
  std::vector<std::uint8_t> const codes{0x30, 0xF8};
  float const scale = 0.25F;
  std::vector<float> out(4);
  WNa16<4, 0>{}.dequantize_weight_row<float>(codes.data(), &scale, 1, 4, 0, out.data());
  EXPECT_EQ(out, (std::vector<float>{-2, -1.25F, 0, 1.75F}));
}
/// docs/semantics/quantization.md §11: a shape that a scheme does not support gives one sentence that names the size.
TEST(QuantizationShapes, SizesThatDoNotFitAreNamed) {
  EXPECT_EQ(shape_violation<Mxfp4<>>(2880 + 16, 64), "mxfp4 needs hidden to be a multiple of 32, got 2896");
  EXPECT_EQ(shape_violation<Mxfp8<>>(64, 40), "mxfp8 needs the intermediate size per partition to be a multiple of 32, got 40");
  EXPECT_EQ(shape_violation<Nvfp4>(24, 64), "nvfp4 needs hidden to be a multiple of 16, got 24");
  EXPECT_EQ(shape_violation<Int4Group128>(64, 33),
            "int4_group128 needs the intermediate size per partition to be a multiple of 32, got 33");
  EXPECT_EQ(shape_violation<Mxfp4<>>(2880, 2880), "") << "gpt-oss";
  EXPECT_EQ(shape_violation<Mxfp4<>>(-1, -1), "") << "sizes known at run time only";
  try {
    check_shape<Nvfp4>(24, 64);
    ADD_FAILURE() << "no error";
  } catch (moe::Error const& e) {
    EXPECT_STREQ(e.what(), "E_CONFIG: nvfp4 needs hidden to be a multiple of 16, got 24");
  }
}
TEST(QuantizationInt4, GroupIsHalvedUntilItDivides) {
  EXPECT_EQ(effective_group(512, 128), 128);
  EXPECT_EQ(effective_group(192, 128), 64);
  EXPECT_EQ(effective_group(96, 128), 32);
  EXPECT_EQ(effective_group(48, 128), 0);
  EXPECT_EQ(effective_group(48, 16), 16);
  EXPECT_EQ(effective_group(40, 0), 40);
  EXPECT_EQ(Int4Group128::weight_scale_count(2, 192), 6);
  EXPECT_FALSE(Int4Group128::supports(48, 128));
  EXPECT_EQ(shape_violation<Int4Group128>(128, 48),
            "int4_group128 needs the intermediate size per partition to be a multiple of 32, got 48");
  EXPECT_THROW(check_shape<Mxfp4<>>(2880 + 8, 64), moe::Error);
  EXPECT_NO_THROW(check_shape<Mxfp4<>>(2880, 2880));
}

}  // namespace
