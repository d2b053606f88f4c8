// SPDX-License-Identifier: Apache-2.0
// tests/unit/quantization_config_test.cpp: the descriptor's rules, static scales, support by GPU, and quantised products:
// docs/semantics/quantization.md §13, Q12, Q18, Q21.
#include "moe/quantization/config.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "expect_error.hpp"
#include "moe/quantization/format/static_scales.hpp"
#include "moe/quantization/schemes.hpp"
#include "moe/quantization/support.hpp"

namespace {

using namespace moe::quantization;
using moe::DType;
using moe_test::what_of;

TEST(QuantizationConfig, Q12_OnlyFourAndEightBits) {
  EXPECT_EQ(what_of([] { wna16(3, 128); }), "E_CONFIG: only 4 and 8 bit weights, got 3 bits");
  EXPECT_EQ(what_of([] { int4_w4a16(48); }), "E_CONFIG: group size 48 is not one of -1, 16, 32, 64, 128, 256");
  for (int const group : {-1, 16, 32, 64, 128, 256}) EXPECT_EQ(wna16(8, group).weight_bits(), 8);
}
TEST(QuantizationConfig, Q12_PerTokenWithBlock) {
  EXPECT_EQ(what_of([] { fp8_w8a8(kPerToken, block_of(128, 128)); }), "E_CONFIG: illegal quantisation: per-token and block");
}
TEST(QuantizationConfig, Q12_BlockCutByTensorParallelism) {
  EXPECT_EQ(what_of([] { check_block_slice(192, 128, 128); }),
            "E_CONFIG: intermediate size per partition not a multiple of the quant block: 192 with blocks of 128");
  EXPECT_EQ(what_of([] { check_block_slice(256, 64, 96); }),
            "E_CONFIG: intermediate size per partition not a multiple of the quant block: 256 with blocks of 96");
  EXPECT_NO_THROW(check_block_slice(256, 128, 128));
}
TEST(QuantizationConfig, BothActivationsAreAlike) {
  auto c = fp8_w8a8(kPerToken, kPerChannel);
  c.a2.dtype = DType::i8;
  EXPECT_EQ(what_of([&] { c.validate(); }), "E_CONFIG: a1 is e4m3 per_token but a2 is i8 per_token; both activations have the same dtype");
  c = fp8_w8a8(kPerToken, kPerChannel);
  c.a2.group_shape = kPerTensor;
  EXPECT_EQ(what_of([&] { c.validate(); }),
            "E_CONFIG: a1 has per_token scales but a2 per_tensor; both activations have the same granularity");
  c = int4_w4a16(128);
  EXPECT_NO_THROW(c.validate());
  c.w2.group_shape = group_of(64);
  EXPECT_THROW(c.validate(), moe::Error);
}
TEST(QuantizationConfig, DerivedFacts) {
  auto const block = fp8_w8a8(group_of(128), block_of(128, 128));
  EXPECT_TRUE(block.use_fp8() && block.is_block_quantised() && block.is_transport_block() && !block.per_act_token() && !block.per_out_ch());
  EXPECT_EQ(block.scale_shape(5, 300), (std::array<std::int64_t, 2>{5, 3}));
  EXPECT_EQ(block.batched_scale_shape(4, 16, 512), (std::array<std::int64_t, 3>{4, 16, 4}));
  auto const token = fp8_w8a8(kPerToken, kPerChannel);
  EXPECT_TRUE(token.per_act_token() && token.per_out_ch() && !token.is_transport_block());
  EXPECT_EQ(token.scale_shape(5, 300), (std::array<std::int64_t, 2>{5, 1}));
  EXPECT_EQ(fp8_w8a8(kPerTensor, kPerTensor).scale_shape(5, 300), (std::array<std::int64_t, 2>{1, 1}));
  EXPECT_EQ(unquantized().scale_shape(5, 300), (std::array<std::int64_t, 2>{0, 0}));
  EXPECT_EQ(mxfp4_w4a8().scale_shape(2, 64), (std::array<std::int64_t, 2>{2, 2}));
  EXPECT_EQ(nvfp4_w4a4().scale_shape(2, 64), (std::array<std::int64_t, 2>{2, 4}));
  EXPECT_EQ(int4_w4a8(128).weight_bits(), 4);
  EXPECT_EQ(unquantized().weight_bits(), 16);
  float const bias = 0;
  EXPECT_EQ(bias_only(&bias, &bias).w1.bias, &bias);
}
TEST(QuantizationConfig, PoliciesDescribeThemselves) {
  EXPECT_TRUE(config_of<Fp8Block<>>().is_transport_block());
  EXPECT_EQ(config_of<Fp8PerToken<>>().a1.group_shape, kPerToken);
  EXPECT_EQ(config_of<Fp8PerTensorStatic>().a1.group_shape, kPerTensor);
  EXPECT_EQ(config_of<Int4Group128>().w1.group_shape, int4_w4a16(128).w1.group_shape);
  EXPECT_EQ(config_of<Int4Group128>().w1.dtype, DType::u4);
  EXPECT_EQ(config_of<Mxfp4W4A8<>>().a1.dtype, mxfp4_w4a8().a1.dtype);
  EXPECT_EQ(config_of<Mxfp8W8A16<>>().a1.dtype, mxfp8_w8a16().a1.dtype);
  EXPECT_EQ(config_of<Mxfp8W8A16<>>().w1.dtype, mxfp8_w8a16().w1.dtype);
  EXPECT_EQ(config_of<Nvfp4>().w1.group_shape, nvfp4_w4a4().w1.group_shape);
  EXPECT_FALSE(config_of<None>().quant_dtype().has_value());
}
TEST(QuantizationConfig, Q21_FnuzIsRefused) {
  EXPECT_EQ(float8_dtype("F8_E4M3"), DType::e4m3);
  EXPECT_EQ(float8_dtype("float8_e5m2"), DType::e5m2);
  EXPECT_EQ(what_of([] { float8_dtype("float8_e4m3fnuz"); }),
            "E_UNSUPPORTED: float8 dtype 'float8_e4m3fnuz' is not supported; the supported ones are e4m3fn, e5m2, e8m0fnu");
}

template <class Quant>
struct SlowExperts {  // emulates every scheme, from sm_80 on
  static constexpr char const* kName = "slow";
  template <class>
  static constexpr Support support_on(int sm) {
    return sm >= 80 ? Support::emulated : Support::none;
  }
};
TEST(QuantizationSupport, Q18_StrictRefusesEmulation) {
  using Experts = SlowExperts<Nvfp4>;
  EXPECT_EQ(what_of([] { check_support<Nvfp4, Experts>(90, true); }),
            "E_UNSUPPORTED: e2m1 group activations, e2m1 group weights, emulated on sm_90 with slow; native execution was required");
  EXPECT_NO_THROW((check_support<Nvfp4, Experts>(90, false)));
  EXPECT_EQ(what_of([] { check_support<Nvfp4, Experts>(75, false); }),
            "E_UNSUPPORTED: e2m1 group activations, e2m1 group weights, unsupported on sm_75 with slow");
}

TEST(QuantizationStaticScales, ExpertsShareTheLargest) {
  EXPECT_EQ(merge_static_scales(std::vector<float>{0.5F, 2.0F, 1.0F}), 2.0F);
  EXPECT_THROW(merge_static_scales({}), moe::Error);
  EXPECT_EQ(what_of([] { merge_static_scales(std::vector<float>{0.5F, 0.0F}); }),
            "E_ARG: static activation scale is 0, expected finite and > 0");
}
TEST(QuantizationStaticScales, CodesMoveToAnotherScale) {
  std::vector<std::uint8_t> codes{encode_e4m3(16.0F), encode_e4m3(-448.0F), encode_e4m3(1.0F)};
  requantize_e4m3(codes, 0.5F, 1.0F);
  EXPECT_EQ(codes, (std::vector<std::uint8_t>{encode_e4m3(8.0F), encode_e4m3(-224.0F), encode_e4m3(0.5F)}));
  std::vector<std::uint8_t> blocks{encode_e4m3(16.0F)};
  rescale_nvfp4_blocks(blocks, 0.25F, 1.0F);
  EXPECT_EQ(decode_e4m3(blocks[0]), 4.0F);
}

std::vector<float> normals(std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> v(n);
  for (float& x : v) x = normal(random);
  return v;
}

/// Root-mean-square error of the quantised product of [rows, cols] with one activation row, relative to the unquantised one.
template <class Scheme>
double product_error(Scheme const& scheme, std::vector<float> const& w, std::vector<float> const& x) {
  auto const cols = std::ssize(x), rows = std::ssize(w) / cols;
  std::vector<std::uint8_t> q(static_cast<std::size_t>(Scheme::payload_cols(cols))),
      codes(static_cast<std::size_t>(rows * Scheme::weight_code_cols(cols)));
  std::vector<typename Scheme::Scale> s(static_cast<std::size_t>(Scheme::scale_cols(cols)));
  std::vector<typename Scheme::WeightScale> scales(static_cast<std::size_t>(Scheme::weight_scale_count(rows, cols)));
  scheme.template quantize_row<float>(x.data(), cols, q.data(), s.data());
  scheme.template quantize_weight<float>(w.data(), rows, cols, codes.data(), scales.data());
  std::vector<float> a(x.size()), b(x.size());
  scheme.template dequantize_row<float>(q.data(), s.data(), cols, a.data());
  double error = 0, norm = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    scheme.template dequantize_weight_row<float>(codes.data(), scales.data(), rows, cols, r, b.data());
    double quantized = 0, exact = 0;
    for (std::int64_t c = 0; c < cols; ++c) {
      auto const i = static_cast<std::size_t>(c);
      quantized += static_cast<double>(a[i]) * b[i];
      exact += static_cast<double>(x[i]) * w[static_cast<std::size_t>(r * cols + c)];
    }
    error += (quantized - exact) * (quantized - exact);
    norm += exact * exact;
  }
  return std::sqrt(error / norm);
}

// The error of quantisation itself; experts_quantized_products_test.cpp tests the experts' products.
TEST(QuantizationProducts, CodesKeepTheProduct) {
  auto const x4 = normals(512, 1), w4 = normals(256 * 512, 2);
  std::uint32_t amax = 0;
  for (float const v : x4) amax = std::max(amax, abs_bits(v));
  EXPECT_LT(product_error(Nvfp4({.global_scale = Nvfp4Codec::global_from_amax(amax)}), w4, x4), 0.2);
  auto x8 = normals(7168, 3);
  auto const w8 = normals(64 * 7168, 4);
  for (std::size_t c = 0; c < x8.size(); ++c) x8[c] *= std::exp2(static_cast<float>(c / 128 % 7));
  EXPECT_LT(product_error(Fp8Block<>(), w8, x8), 0.06);
}

}  // namespace
