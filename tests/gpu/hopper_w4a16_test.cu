// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_w4a16_test.cu: the layer with 4-bit weights equals the device oracle on dequantised weights: int4 with and without zero
// points in groups of 128 and 32, mxfp4, nvfp4, biases, clamped activation, both formats, odd loads, graphs, poisoned memory, and refused
// arguments.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/core/contract/check.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "on_hopper.hpp"
#include "packed_cases.cuh"
#include "w4_composition.cuh"

namespace {

using namespace moe;
using moe_test::composition_output;
using moe_test::on_hopper;
using quantization::Int4Group128;
using quantization::Int4Group128Zero;
using Int4Group32 = quantization::WNa16<4, 32>;
using Int4Group32Zero = quantization::WNa16<4, 32, true>;
using Int4Group64 = quantization::WNa16<4, 64>;
using Mxfp4 = quantization::Mxfp4W4A16<>;
using Nvfp4 = quantization::Nvfp4W4A16;
using Cuda = space::cuda;
using Config = moe_test::PackedConfig;
using moe_test::kGptOss;
using moe_test::kSilu;
using moe_test::Load;
using moe_test::RandomWeights;
using moe_test::relative_error;
using moe_test::Sizes;

#define NEEDS_HOPPER() \
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0"

template <class Quant>
double standard_error(Sizes const& s, int tokens, Load load, std::uint64_t seed, bool biases = false, activation::Any const& act = kSilu,
                      int exponent = 0, bool weight_on_input = false) {
  return moe_test::standard_error<Quant, experts::HopperW4A16>(s, tokens, load, seed, biases, act, exponent, weight_on_input);
}

constexpr double kTolerance = 5e-3;

template <class Quant>
void many_sizes() {
  Sizes const small{8, 256, 192, 2};
  std::uint64_t seed = 10;
  for (int tokens : {1, 2, 7, 33, 64, 129, 222, 1024, 4096}) {
    EXPECT_LT(standard_error<Quant>(small, tokens, Load::random, ++seed), kTolerance) << tokens << " tokens";
  }
}
TEST(HopperW4A16, X3_Int4) {
  NEEDS_HOPPER();
  many_sizes<Int4Group128>();
}
TEST(HopperW4A16, X3_Int4ZeroPoints) {
  NEEDS_HOPPER();
  many_sizes<Int4Group128Zero>();
}
TEST(HopperW4A16, X3_Mxfp4) {
  NEEDS_HOPPER();
  many_sizes<Mxfp4>();
}

TEST(HopperW4A16, X3_Int4Group64) {
  NEEDS_HOPPER();
  many_sizes<Int4Group64>();
}
TEST(HopperW4A16, X3_Int4Group32) {
  NEEDS_HOPPER();
  many_sizes<Int4Group32>();
}
TEST(HopperW4A16, X3_Int4Group32ZeroPoints) {
  NEEDS_HOPPER();
  many_sizes<Int4Group32Zero>();
}
TEST(HopperW4A16, X3_Nvfp4) {
  NEEDS_HOPPER();
  many_sizes<Nvfp4>();
}

TEST(HopperW4A16, X5_SkewedLoads) {
  NEEDS_HOPPER();
  std::uint64_t seed = 100;
  for (Load load : {Load::one_expert, Load::some_missing, Load::all_missing, Load::few_experts}) {
    for (int tokens : {1, 40, 700}) {
      EXPECT_LT(standard_error<Mxfp4>({16, 320, 320, 4}, tokens, load, ++seed), kTolerance) << static_cast<int>(load) << ", " << tokens;
      EXPECT_LT(standard_error<Int4Group128>({4, 512, 128, 1}, tokens, load, ++seed), kTolerance)
          << static_cast<int>(load) << ", " << tokens;
      EXPECT_LT(standard_error<Int4Group32>({16, 320, 320, 4}, tokens, load, ++seed), kTolerance)
          << static_cast<int>(load) << ", " << tokens;
      EXPECT_LT(standard_error<Nvfp4>({16, 320, 320, 4}, tokens, load, ++seed), kTolerance) << static_cast<int>(load) << ", " << tokens;
    }
  }
  EXPECT_LT(standard_error<Mxfp4>({1, 128, 128, 1}, 300, Load::random, ++seed), kTolerance);
}

TEST(HopperW4A16, Q17_X9_GptOssWithBiases) {
  NEEDS_HOPPER();
  for (int tokens : {1, 9, 150}) {
    EXPECT_LT(standard_error<Mxfp4>({4, 2880, 2880, 2}, tokens, Load::random, 200 + static_cast<unsigned>(tokens), true, kGptOss),
              kTolerance)
        << tokens << " tokens";
  }
  EXPECT_LT(standard_error<Int4Group128Zero>({3, 192, 2880, 3}, 20, Load::random, 300, true, kGptOss), kTolerance);
  EXPECT_LT(standard_error<Int4Group32Zero>({3, 192, 2880, 3}, 20, Load::random, 302, true, kGptOss), kTolerance);
  EXPECT_LT(standard_error<Nvfp4>({3, 192, 2880, 3}, 20, Load::random, 303, true, kGptOss), kTolerance);
  activation::Any const clamped{activation::Kind::silu_clamped, {1.702F, 1.0F, 0.5F, 4.0F, 25.0F}};
  EXPECT_LT(standard_error<Int4Group128>({3, 192, 192, 3}, 20, Load::random, 301, true, clamped), kTolerance);
}

template <class Quant>
class HopperW4A16Storages : public testing::Test {};
using AllStorages = testing::Types<Int4Group128, Int4Group128Zero, Int4Group32, Int4Group32Zero, Mxfp4, Nvfp4>;
TYPED_TEST_SUITE(HopperW4A16Storages, AllStorages);

// Tiles of 16, of the middle kernel and of the largest; of K in parts, with 1 and 5 tokens. Without a gate a brick is 64 features.
TYPED_TEST(HopperW4A16Storages, X2_X9_EveryActivationWithBiases) {
  NEEDS_HOPPER();
  for (int k = 0; k < activation::kKinds; ++k) {
    activation::Any act{static_cast<activation::Kind>(k)};
    act.constants.limit = 1.5F;  // limits some of the values
    for (int tokens : {1, 5, 70, 700}) {
      auto const seed = static_cast<std::uint64_t>(1000 + 10 * k);
      EXPECT_LT(standard_error<TypeParam>({8, 256, 384, 2}, tokens, Load::random, seed, true, act), kTolerance)
          << activation::name(act.kind) << ", " << tokens << " tokens";
    }
    EXPECT_LT(standard_error<TypeParam>({4, 128, 192, 1}, 60, Load::some_missing, 2000, false, act), kTolerance)
        << activation::name(act.kind) << ", 64 of 256 features in the last tile";
  }
}

TYPED_TEST(HopperW4A16Storages, X8_WeightOnTheInput) {
  NEEDS_HOPPER();
  for (activation::Kind kind : {activation::Kind::silu, activation::Kind::gelu, activation::Kind::relu2_no_mul}) {
    for (int k : {1, 2}) {
      for (int tokens : {1, 60, 400}) {
        EXPECT_LT(standard_error<TypeParam>({8, 256, 128, k}, tokens, Load::random, 3000, true, activation::Any{kind}, 0, true), kTolerance)
            << activation::name(kind) << ", top " << k << ", " << tokens << " tokens";
      }
    }
  }
}

TYPED_TEST(HopperW4A16Storages, X19_GraphFollowsTheDevicesRowCount) {
  NEEDS_HOPPER();
  moe_test::graph_follows_the_devices_row_count<TypeParam, experts::HopperW4A16>();
}
TYPED_TEST(HopperW4A16Storages, Batched) {
  NEEDS_HOPPER();
  moe_test::batched_equals_oracle<TypeParam, experts::HopperW4A16>(kTolerance);
}
TYPED_TEST(HopperW4A16Storages, WeightsChangedInPlaceArePackedAnew) {
  NEEDS_HOPPER();
  constexpr bool kInt4 = TypeParam::kWeightDType == DType::u4;  // has whole bricks
  moe_test::weights_changed_in_place_are_packed_anew<TypeParam, experts::HopperW4A16>(kInt4 ? 192 : 96);
}

TEST(HopperW4A16, UngatedWidthsThatLeaveHalfABrick) {
  NEEDS_HOPPER();
  activation::Any const relu2{activation::Kind::relu2_no_mul};
  for (int tokens : {3, 60, 300}) {
    EXPECT_LT(standard_error<Mxfp4>({4, 128, 1440, 2}, tokens, Load::random, 380, true, relu2), kTolerance) << tokens;
    EXPECT_LT(standard_error<Mxfp4>({4, 64, 32, 2}, tokens, Load::random, 381, true, relu2), kTolerance) << tokens;
    EXPECT_LT(standard_error<Nvfp4>({4, 128, 96, 2}, tokens, Load::random, 382, true, relu2), kTolerance) << tokens;
  }
}

TEST(HopperW4A16, WidthsThatLeaveHalfABrick) {
  NEEDS_HOPPER();
  for (int tokens : {3, 60, 300}) {
    EXPECT_LT(standard_error<Mxfp4>({4, 128, 1440, 2}, tokens, Load::random, 350 + static_cast<unsigned>(tokens), true, kGptOss),
              kTolerance);
    EXPECT_LT(standard_error<Mxfp4>({4, 64, 32, 2}, tokens, Load::random, 360 + static_cast<unsigned>(tokens), true), kTolerance);
    EXPECT_LT(standard_error<Nvfp4>({4, 128, 96, 2}, tokens, Load::random, 370 + static_cast<unsigned>(tokens), true), kTolerance);
  }
}

TEST(HopperW4A16, Mxfp4ExponentsBeyondBf16Multipliers) {
  NEEDS_HOPPER();
  EXPECT_LT(standard_error<Mxfp4>({4, 256, 256, 2}, 16, Load::random, 400, false, kSilu, 30), kTolerance);
}
TEST(HopperW4A16, Mxfp4ScaleBytesAtTheEndsOfTheirRange) {
  NEEDS_HOPPER();
  moe_test::ends_of_scales_equal_oracle<Mxfp4, experts::HopperW4A16>(kTolerance, kTolerance);
}

TEST(HopperW4A16, WorkersLimitTheMultiprocessors) {
  NEEDS_HOPPER();
  moe_test::workers_limit_the_multiprocessors<Int4Group128, experts::HopperW4A16>(kTolerance);
  moe_test::workers_limit_the_multiprocessors<Mxfp4, experts::HopperW4A16>(kTolerance);
}

TEST(HopperW4A16, Refusals) {
  NEEDS_HOPPER();
  std::mt19937_64 gen(700);
  Sizes const s{2, 128, 128, 1};
  auto const refusal = [](auto const& weights, LayerShape const& shape, activation::Any const& act = kSilu) {
    return moe_test::refusal_of<experts::HopperW4A16>(weights, shape, act);
  };
  LayerShape const shape{s.hidden, s.intermediate, s.experts, s.topk};
  LayerShape on_input = shape;
  on_input.weight_on_input = true;
  RandomWeights<Mxfp4> const weights(s, false, gen);
  EXPECT_EQ(refusal(weights, on_input), std::nullopt);
  EXPECT_EQ(refusal(weights, shape, activation::Any{activation::Kind::gelu}), std::nullopt);
  EXPECT_EQ(refusal(weights, shape, activation::Any{activation::Kind::swiglu_step}), ErrorCode::config) << "without its limit";
  EXPECT_EQ(refusal(weights, shape, activation::Any{activation::Kind::relu2_no_mul}), ErrorCode::argument) << "I rows of w13";
  EXPECT_EQ(refusal(RandomWeights<Int4Group128Zero>(s, false, gen, 0, 0.5F), shape), ErrorCode::unsupported);
  EXPECT_EQ(refusal(RandomWeights<Int4Group32Zero>(s, false, gen, 0, 0.5F), shape), ErrorCode::unsupported);
  RandomWeights<Int4Group32> const infinite(s, false, gen);
  float const infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(cudaMemcpy(const_cast<float*>(infinite.s2.data()) + 5, &infinity, sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(refusal(infinite, shape), ErrorCode::unsupported);
  RandomWeights<Nvfp4> const not_a_number(s, false, gen);
  EXPECT_EQ(refusal(not_a_number, shape), std::nullopt);
  EXPECT_EQ(cudaMemset(const_cast<std::uint8_t*>(not_a_number.s13.data()) + 9, 0x7F, 1), cudaSuccess);
  EXPECT_EQ(refusal(not_a_number, shape), ErrorCode::unsupported);
  Sizes const narrow{2, 96, 128, 1};
  EXPECT_EQ(refusal(RandomWeights<Mxfp4>(narrow, false, gen), LayerShape{96, 128, 2, 1}), ErrorCode::config);
}

/// The refusal of a layer one of whose w13 scales is `value`.
template <class Quant>
std::string message_with(std::int64_t at, auto value) {
  std::mt19937_64 gen(710);
  RandomWeights<Quant> const weights({2, 128, 128, 1}, false, gen);
  EXPECT_EQ(cudaMemcpy(const_cast<typename Quant::WeightScale*>(weights.s13.data()) + at, &value, sizeof(value), cudaMemcpyHostToDevice),
            cudaSuccess);
  return moe_test::refusal_message<experts::HopperW4A16>(weights, {128, 128, 2, 1});
}

TEST(HopperW4A16, ScalesThatCannotBePackedAreRefused) {
  NEEDS_HOPPER();
  auto const is = [](char const* scheme, char const* fault) { return text("hopper_w4a16: w13 in ", scheme, ": ", fault); };
  float const nan = std::numeric_limits<float>::quiet_NaN();
  char const* const zero = " with zero point 3.5, 15 times it must be finite, and its zero point an integer of 0 to 15";
  EXPECT_EQ(message_with<Int4Group128>(256 + 3, nan), is("int4", "scale 3 of expert 1 is nan, 15 times it must be finite"));
  EXPECT_EQ(message_with<Int4Group128>(5, 3e38F), is("int4", "scale 5 of expert 0 is 3e+38, 15 times it must be finite"));
  EXPECT_EQ(message_with<Int4Group128>(5, -2e37F), "");
  EXPECT_EQ(message_with<Int4Group32>(1024 + 9, nan), is("int4_32", "scale 9 of expert 1 is nan, 15 times it must be finite"));
  quantization::ScaleZero const half{1.0F, 3.5F};
  EXPECT_EQ(message_with<Int4Group128Zero>(256 + 3, half), is("int4_zero", text("scale 3 of expert 1 is 1", zero).c_str()));
  EXPECT_EQ(message_with<Int4Group32Zero>(1024 + 9, half), is("int4_32_zero", text("scale 9 of expert 1 is 1", zero).c_str()));
  EXPECT_EQ(message_with<Mxfp4>(1024 + 7, std::uint8_t{252}), "");
  EXPECT_EQ(message_with<Mxfp4>(1024 + 7, std::uint8_t{253}),
            is("mxfp4", "scale 7 of expert 1 is byte 253, at most 252 gives finite weights"));
  EXPECT_EQ(message_with<Nvfp4>(2052 + 9, std::uint8_t{0xFF}), is("nvfp4", "scale 9 of expert 1 is byte 255, which is not a number"));
  EXPECT_EQ(message_with<Nvfp4>(2052 + 2048, 0.0F),
            is("nvfp4", "the scale of expert 1 is 0, it must be positive, and 2688 times it finite"));
}

using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
template <class Quant, class Experts>
using Compose = Composition<Config, Router, Quant, backends::NoExpertParallel<Cuda>, Experts>;
static_assert(Compose<Int4Group128, experts::HopperW4A16>::kLegal && Compose<Int4Group128Zero, experts::HopperW4A16>::kLegal);
static_assert(Compose<Mxfp4, experts::HopperW4A16>::kLegal);
static_assert(!Compose<quantization::None, experts::HopperW4A16>::kLegal && Compose<quantization::Mxfp4<>, experts::HopperW4A16>::kLegal);
static_assert(Compose<Int4Group32, experts::HopperW4A16>::kLegal && Compose<Int4Group32Zero, experts::HopperW4A16>::kLegal);
static_assert(Compose<Nvfp4, experts::HopperW4A16>::kLegal && Compose<quantization::Nvfp4, experts::HopperW4A16>::kLegal);
static_assert(!Compose<quantization::WNa16<4, 16>, experts::HopperW4A16>::kLegal);

TEST(HopperW4A16, CompositionEqualsOracle) {
  NEEDS_HOPPER();
  for (std::int64_t rows : {1, 50}) {
    auto const int4 = composition_output<Config, Int4Group128, experts::HopperW4A16>(rows);
    EXPECT_LT(relative_error(int4, composition_output<Config, Int4Group128, experts::CudaReference>(rows)), kTolerance);
    auto const group32 = composition_output<Config, Int4Group32, experts::HopperW4A16>(rows);
    EXPECT_LT(relative_error(group32, composition_output<Config, Int4Group32, experts::CudaReference>(rows)), kTolerance);
    auto const nvfp4 = composition_output<Config, Nvfp4, experts::HopperW4A16>(rows);
    EXPECT_LT(relative_error(nvfp4, composition_output<Config, Nvfp4, experts::CudaReference>(rows)), kTolerance);
    auto const mxfp4 = composition_output<Config, Mxfp4, experts::HopperW4A16>(rows);
    EXPECT_LT(relative_error(mxfp4, composition_output<Config, Mxfp4, experts::CudaReference>(rows)), kTolerance);
  }
}

}  // namespace
