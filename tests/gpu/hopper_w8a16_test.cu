// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_w8a16_test.cu: the layer with 8-bit weights alone equals the device oracle on dequantised weights: int8 and e4m3 with a
// scale per output channel, mxfp8, biases, every activation, both formats, widths that fill no brick, odd loads, graphs, weights replaced
// in place, and refused arguments.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <type_traits>

#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/core/contract/check.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/quantization/fp8_per_channel.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/mxfp8.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/softmax_topk.hpp"
#include "on_hopper.hpp"
#include "packed_cases.cuh"
#include "w4_composition.cuh"

namespace {

using namespace moe;
using Cuda = space::cuda;
using Config = moe_test::PackedConfig;
using moe_test::kGptOss;
using moe_test::kSilu;
using moe_test::Load;
using moe_test::on_hopper;
using moe_test::RandomWeights;
using moe_test::relative_error;
using moe_test::Sizes;
using Int8 = quantization::Int8PerChannel;
using Fp8 = quantization::Fp8PerChannel<>;
using Mxfp8 = quantization::Mxfp8W8A16<>;

constexpr double kTolerance = 5e-3;

template <class Quant>
class HopperW8A16 : public testing::Test {
 protected:
  static double standard_error(Sizes const& s, int tokens, Load load, std::uint64_t seed, bool biases = false,
                               activation::Any const& act = kSilu, bool weight_on_input = false) {
    return moe_test::standard_error<Quant, experts::HopperW8A16>(s, tokens, load, seed, biases, act, 0, weight_on_input);
  }
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
};
using Schemes = testing::Types<Int8, Fp8, Mxfp8>;
TYPED_TEST_SUITE(HopperW8A16, Schemes);

// Tiles of 16, of the middle kernel and of the largest, with every number of columns; K in parts and whole.
TYPED_TEST(HopperW8A16, X3_EveryTile) {
  Sizes const small{8, 256, 192, 2};
  std::uint64_t seed = 10;
  for (int tokens : {1, 2, 7, 33, 64, 129, 222, 300, 380, 1024, 4096}) {
    EXPECT_LT(TestFixture::standard_error(small, tokens, Load::random, ++seed), kTolerance) << tokens << " tokens";
  }
}

TYPED_TEST(HopperW8A16, X5_SkewedLoads) {
  std::uint64_t seed = 100;
  for (Load load : {Load::one_expert, Load::some_missing, Load::all_missing, Load::few_experts}) {
    for (int tokens : {1, 40, 700}) {
      EXPECT_LT(TestFixture::standard_error({16, 320, 320, 4}, tokens, load, ++seed), kTolerance)
          << static_cast<int>(load) << ", " << tokens;
      EXPECT_LT(TestFixture::standard_error({4, 512, 128, 1}, tokens, load, ++seed), kTolerance)
          << static_cast<int>(load) << ", " << tokens;
    }
  }
  EXPECT_LT(TestFixture::standard_error({1, 128, 128, 1}, 300, Load::random, ++seed), kTolerance);
}

TYPED_TEST(HopperW8A16, X9_GptOssSizesWithBiases) {
  for (int tokens : {1, 9, 150}) {
    EXPECT_LT(
        TestFixture::standard_error({4, 2880, 2880, 2}, tokens, Load::random, 200 + static_cast<std::uint64_t>(tokens), true, kGptOss),
        kTolerance)
        << tokens << " tokens";
  }
}

TYPED_TEST(HopperW8A16, X2_X9_EveryActivationWithBiases) {
  for (int k = 0; k < activation::kKinds; ++k) {
    activation::Any act{static_cast<activation::Kind>(k)};
    act.constants.limit = 1.5F;  // limits some of the values
    auto const seed = static_cast<std::uint64_t>(1000 + 10 * k);
    for (int tokens : {1, 5, 70, 700}) {
      EXPECT_LT(TestFixture::standard_error({8, 256, 384, 2}, tokens, Load::random, seed, true, act), kTolerance)
          << activation::name(act.kind) << ", " << tokens << " tokens";
    }
    EXPECT_LT(TestFixture::standard_error({4, 128, 192, 1}, 60, Load::some_missing, seed, false, act), kTolerance)
        << activation::name(act.kind) << ", 64 of 256 features in the last tile";
    int const width = std::is_same_v<TypeParam, Mxfp8> ? 96 : 43;
    EXPECT_LT(TestFixture::standard_error({4, 128, width, 2}, 60, Load::random, seed, true, act), kTolerance)
        << activation::name(act.kind) << ", features and K end inside a brick";
  }
}

TYPED_TEST(HopperW8A16, X8_WeightOnTheInput) {
  for (activation::Kind kind : {activation::Kind::silu, activation::Kind::gelu, activation::Kind::relu2_no_mul}) {
    for (int k : {1, 2}) {
      for (int tokens : {1, 60, 400}) {
        EXPECT_LT(TestFixture::standard_error({8, 256, 128, k}, tokens, Load::random, 3000, true, activation::Any{kind}, true), kTolerance)
            << activation::name(kind) << ", top " << k << ", " << tokens << " tokens";
      }
    }
  }
}

TYPED_TEST(HopperW8A16, AnyIntermediateWidth) {
  for (int width : {1, 8, 33, 65, 100, 255, 1441, 32, 96, 1440}) {
    if (std::is_same_v<TypeParam, Mxfp8> && width % 32 != 0) continue;
    for (int tokens : {3, 60, 400}) {
      EXPECT_LT(TestFixture::standard_error({4, 128, width, 2}, tokens, Load::random, 350, true), kTolerance)
          << width << ", " << tokens << " tokens";
    }
  }
}

TYPED_TEST(HopperW8A16, X19_GraphFollowsTheDevicesRowCount) {
  moe_test::graph_follows_the_devices_row_count<TypeParam, experts::HopperW8A16>();
}
TYPED_TEST(HopperW8A16, Batched) { moe_test::batched_equals_oracle<TypeParam, experts::HopperW8A16>(kTolerance); }
TYPED_TEST(HopperW8A16, WeightsChangedInPlaceArePackedAnew) {
  moe_test::weights_changed_in_place_are_packed_anew<TypeParam, experts::HopperW8A16>();
}

template <class Quant>
std::optional<ErrorCode> refusal(RandomWeights<Quant> const& weights, LayerShape const& shape, activation::Any const& act = kSilu) {
  return moe_test::refusal_of<experts::HopperW8A16>(weights, shape, act);
}
Sizes const kRefused{2, 128, 128, 1};
LayerShape const kRefusedShape{128, 128, 2, 1};

TYPED_TEST(HopperW8A16, Refusals) {
  std::mt19937_64 gen(700);
  RandomWeights<TypeParam> const weights(kRefused, false, gen);
  EXPECT_EQ(refusal(weights, kRefusedShape), std::nullopt);
  EXPECT_EQ(refusal(weights, kRefusedShape, activation::Any{activation::Kind::swiglu_step}), ErrorCode::config) << "without its limit";
  EXPECT_EQ(refusal(weights, kRefusedShape, activation::Any{activation::Kind::relu2_no_mul}), ErrorCode::argument) << "I rows of w13";
  Sizes const narrow{2, 96, 128, 1};
  EXPECT_EQ(refusal(RandomWeights<TypeParam>(narrow, false, gen), LayerShape{96, 128, 2, 1}), ErrorCode::config) << "hidden 96";
}

/// The message about weights of w2 whose scale or code `at` is `value`.
template <class Quant, class T>
std::string message_about(T const* array, int at, T value, RandomWeights<Quant> const& weights) {
  EXPECT_EQ(cudaMemcpy(const_cast<T*>(array) + at, &value, sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  return moe_test::refusal_message<experts::HopperW8A16>(weights, kRefusedShape);
}
TEST(HopperW8A16Refuses, ScalesAndCodesThatAreNotFinite) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  std::mt19937_64 gen(701);
  float const infinity = std::numeric_limits<float>::infinity();
  RandomWeights<Int8> const int8(kRefused, false, gen);
  EXPECT_EQ(message_about(int8.s2.data(), 5, infinity, int8),
            "hopper_w8a16: w2 in int8: scale 5 of expert 0 is inf, 128 times it must be finite");
  RandomWeights<Fp8> const fp8(kRefused, false, gen);
  EXPECT_EQ(message_about(fp8.s2.data(), 128 + 5, infinity, fp8),
            "hopper_w8a16: w2 in fp8: scale 5 of expert 1 is inf, 448 times it must be finite");
  RandomWeights<Fp8> const nan(kRefused, false, gen);
  EXPECT_EQ(message_about(reinterpret_cast<std::uint8_t const*>(nan.c2.data()), 128 * 128 + 9, std::uint8_t{0xFF}, nan),
            "hopper_w8a16: w2 in fp8: weight 9 of expert 1 is not a number");
  RandomWeights<Mxfp8> const mx(kRefused, false, gen);
  EXPECT_EQ(message_about(mx.s2.data(), 7, std::uint8_t{247}, mx),
            "hopper_w8a16: w2 in mxfp8: scale 7 of expert 0 is byte 247, at most 246 gives finite weights");
}

// Powers of two far from 1, subnormal codes among them; those of 2^100 need a power of two of the expert.
TEST(HopperW8A16Mxfp8, ExtremeScales) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  for (int exponent : {-100, -60, 0, 60, 100}) {
    for (int tokens : {3, 300}) {
      double const error = moe_test::standard_error<Mxfp8, experts::HopperW8A16>({4, 256, 128, 2}, tokens, Load::random, 710, false,
                                                                                 activation::Any{activation::Kind::silu_no_mul}, exponent);
      EXPECT_LT(error, kTolerance) << "2^" << exponent << ", " << tokens << " tokens";
    }
  }
}

using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
template <class Q, class Experts>
using Compose = Composition<Config, Router, Q, backends::NoExpertParallel<Cuda>, Experts>;
static_assert(Compose<Int8, experts::HopperW8A16>::kLegal && Compose<Fp8, experts::HopperW8A16>::kLegal);
static_assert(Compose<Mxfp8, experts::HopperW8A16>::kLegal && Compose<quantization::Mxfp8<>, experts::HopperW8A16>::kLegal);
static_assert(!Compose<quantization::None, experts::HopperW8A16>::kLegal &&
              !Compose<quantization::Int4Group128, experts::HopperW8A16>::kLegal);

TYPED_TEST(HopperW8A16, CompositionEqualsOracle) {
  for (std::int64_t rows : {1, 50}) {
    auto const got = moe_test::composition_output<Config, TypeParam, experts::HopperW8A16>(rows);
    EXPECT_LT(relative_error(got, moe_test::composition_output<Config, TypeParam, experts::CudaReference>(rows)), kTolerance);
  }
}

}  // namespace
