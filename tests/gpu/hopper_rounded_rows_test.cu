// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_rounded_rows_test.cu: schemes with rows in codes, whose products the Hopper experts compute in bf16, equal the device
// oracle: every tile, odd loads, biases, every activation, both formats, graphs, weights replaced in place, a global scale, and refused
// arguments.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/core/contract/check.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/mxfp8.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "moe/quantization/w4a8.hpp"
#include "on_hopper.hpp"
#include "packed_cases.cuh"

namespace {

using namespace moe;
using moe_test::kGptOss;
using moe_test::kSilu;
using moe_test::Load;
using moe_test::on_hopper;
using moe_test::RandomCall;
using moe_test::RandomWeights;
using moe_test::relative_error;
using moe_test::Scales;
using moe_test::Sizes;

constexpr double kTolerance = 1e-2;

template <class Quant_, class Experts_>
struct Pair {
  using Quant = Quant_;
  using Experts = Experts_;
};

template <class P>
class HopperRoundedRows : public testing::Test {
 protected:
  using Quant = typename P::Quant;
  using Experts = typename P::Experts;
  static double standard_error(Sizes const& s, int tokens, Load load, std::uint64_t seed, bool biases = false,
                               activation::Any const& act = kSilu, bool weight_on_input = false, Scales scales = Scales::positive) {
    return moe_test::standard_error<Quant, Experts>(s, tokens, load, seed, biases, act, 0, weight_on_input, scales);
  }
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
};
using W4 = experts::HopperW4A16;
using Schemes = testing::Types<Pair<quantization::Mxfp8<>, experts::HopperW8A16>, Pair<quantization::Mxfp4<>, W4>,
                               Pair<quantization::Mxfp4W4A8<>, W4>, Pair<quantization::Nvfp4, W4>, Pair<quantization::W4A8Fp8, W4>,
                               Pair<quantization::W4A8<quantization::Fp8Codec<>, 32>, W4>, Pair<quantization::W4A8Int8, W4>>;
TYPED_TEST_SUITE(HopperRoundedRows, Schemes);

// Tiles of 16, of the middle kernel and of the largest, with every number of columns; K in parts and whole.
TYPED_TEST(HopperRoundedRows, X3_EveryTile) {
  std::uint64_t seed = 10;
  for (int tokens : {1, 2, 7, 33, 64, 129, 222, 300, 380, 1024, 4096}) {
    EXPECT_LT(TestFixture::standard_error({8, 256, 192, 2}, tokens, Load::random, ++seed), kTolerance) << tokens << " tokens";
  }
}

TYPED_TEST(HopperRoundedRows, X5_SkewedLoads) {
  using Quant = typename TypeParam::Quant;
  using Experts = typename TypeParam::Experts;
  moe_test::skewed_loads_equal_oracle<Quant, Experts>({16, 320, 320, 4}, kTolerance);
  moe_test::skewed_loads_equal_oracle<Quant, Experts>({4, 512, 128, 1}, kTolerance);
}

TYPED_TEST(HopperRoundedRows, X9_GptOssSizesWithBiases) {
  for (int tokens : {1, 9, 150}) {
    auto const seed = 200 + static_cast<std::uint64_t>(tokens);
    EXPECT_LT(TestFixture::standard_error({4, 2880, 2880, 2}, tokens, Load::random, seed, true, kGptOss), kTolerance) << tokens;
  }
}

// A feature of the intermediate that lies midway between two codes is rounded either way, and may be a large part of one of few rows. So
// scales of int4 are bf16, which the kernels hold as they are: those of float32 are rounded to 11 bits and move more features.
TYPED_TEST(HopperRoundedRows, X2_X9_EveryActivationWithBiases) {
  for (int k = 0; k < activation::kKinds; ++k) {
    activation::Any act{static_cast<activation::Kind>(k)};
    act.constants.limit = 1.5F;  // limits some of the values
    auto const seed = static_cast<std::uint64_t>(1000 + 10 * k);
    for (int tokens : {1, 5, 70, 700}) {
      double const error = TestFixture::standard_error({8, 256, 384, 2}, tokens, Load::random, seed, true, act, false, Scales::of_bf16);
      EXPECT_LT(error, tokens < 50 ? 2e-2 : kTolerance) << activation::name(act.kind) << ", " << tokens << " tokens";
    }
    double const error = TestFixture::standard_error({4, 128, 192, 1}, 60, Load::some_missing, seed, false, act, false, Scales::of_bf16);
    EXPECT_LT(error, kTolerance) << activation::name(act.kind) << ", 64 of 256 features in the last tile";
  }
}

// Rounded to bf16 before its codes the intermediate would move these outputs by 7e-3 (int8) to 4e-2 (mxfp4). Scales are held as they are,
// and of many rows single codes weigh little: what is left is the bf16 of the outputs.
TYPED_TEST(HopperRoundedRows, TheIntermediateIsRoundedOnce) {
  for (int tokens : {700, 1500}) {
    double const error = TestFixture::standard_error({8, 256, 384, 2}, tokens, Load::random, 4000, false, kSilu, false, Scales::of_bf16);
    EXPECT_LT(error, 5e-3) << tokens << " tokens";
  }
}

TYPED_TEST(HopperRoundedRows, X8_WeightOnTheInput) {
  for (activation::Kind kind : {activation::Kind::silu, activation::Kind::gelu, activation::Kind::relu2_no_mul}) {
    for (int k : {1, 2}) {
      for (int tokens : {60, 400}) {
        EXPECT_LT(TestFixture::standard_error({8, 256, 128, k}, tokens, Load::random, 3000, true, activation::Any{kind}, true), kTolerance)
            << activation::name(kind) << ", top " << k << ", " << tokens << " tokens";
      }
    }
  }
}

TYPED_TEST(HopperRoundedRows, NarrowAndHalfBricks) {
  constexpr bool kInt4 = TypeParam::Quant::kWeightDType == DType::u4;  // has whole bricks
  for (int width : {32, 64, 96, 1440}) {
    if (kInt4 && width % 64 != 0) continue;
    for (int tokens : {3, 60, 400}) {
      EXPECT_LT(TestFixture::standard_error({4, 128, width, 2}, tokens, Load::random, 350, true), kTolerance)
          << width << ", " << tokens << " tokens";
    }
  }
}

TYPED_TEST(HopperRoundedRows, X19_GraphFollowsTheDevicesRowCount) {
  moe_test::graph_follows_the_devices_row_count<typename TypeParam::Quant, typename TypeParam::Experts>(6);
}
TYPED_TEST(HopperRoundedRows, Batched) {
  moe_test::batched_equals_oracle<typename TypeParam::Quant, typename TypeParam::Experts>(kTolerance);
}
TYPED_TEST(HopperRoundedRows, WeightsChangedInPlaceArePackedAnew) {
  moe_test::weights_changed_in_place_are_packed_anew<typename TypeParam::Quant, typename TypeParam::Experts>(128);
}
TYPED_TEST(HopperRoundedRows, WorkersLimitTheMultiprocessors) {
  moe_test::workers_limit_the_multiprocessors<typename TypeParam::Quant, typename TypeParam::Experts>(kTolerance);
}

/// The output of experts on `call` with a global scale, as float32.
template <class Experts, class Element>
std::vector<float> with_global_scale(LayerShape const& shape, RandomWeights<quantization::Nvfp4> const& weights,
                                     StandardTokensOf<moe_test::PackedConfig, quantization::Nvfp4> const& batch, float global_scale) {
  std::int64_t const tokens = batch.rows.extent(0);
  Arena<space::cuda> arena;
  moe_test::StandardKernel<quantization::Nvfp4, Experts> kernel(Shape<moe_test::PackedConfig>(shape), weights.view, tokens,
                                                                quantization::Nvfp4({global_scale}), kSilu, {}, arena);
  Buffer<Element, space::cuda> y(tokens * shape.hidden);
  kernel.apply(batch, make_rows(y.data(), tokens, std::int64_t{shape.hidden}), nullptr);
  std::vector<Element> out(static_cast<std::size_t>(y.size()));
  y.copy_to_host(out.data());
  std::vector<float> wide;
  for (Element v : out) wide.push_back(to_float(v));
  return wide;
}

TEST(HopperRoundedNvfp4, GlobalScaleOfTheRows) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  Sizes const s{8, 256, 192, 2};
  std::mt19937_64 gen(900);
  RandomWeights<quantization::Nvfp4> const weights(s, true, gen);
  RandomCall<quantization::Nvfp4> const call(s, 100, Load::random, gen);
  LayerShape const shape{s.hidden, s.intermediate, s.experts, s.topk};
  for (float global : {0.37F, 3.0F}) {  // the codes mean rows of other sizes
    auto const want = with_global_scale<experts::CudaReference, float>(shape, weights, call.batch, global);
    EXPECT_LT(relative_error(with_global_scale<W4, bf16>(shape, weights, call.batch, global), want), kTolerance) << global;
  }
  for (float bad : {0.0F, -1.0F, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    auto const error = moe_test::error_of([&] { with_global_scale<W4, bf16>(shape, weights, call.batch, bad); });
    ASSERT_TRUE(error.has_value()) << bad;
    EXPECT_EQ(error->code(), ErrorCode::config);
    EXPECT_NE(error->message().find("global scale"), std::string::npos) << error->message();
  }
}

TEST(HopperRounded, RefusesRowsOfAnotherWidth) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  Sizes const s{2, 128, 128, 1};
  std::mt19937_64 gen(901);
  RandomWeights<quantization::Mxfp4<>> const weights(s, false, gen);
  RandomCall<quantization::Mxfp4<>> call(s, 4, Load::random, gen);
  Arena<space::cuda> arena;
  moe_test::StandardKernel<quantization::Mxfp4<>, W4> kernel(Shape<moe_test::PackedConfig>(LayerShape{128, 128, 2, 1}), weights.view, 4, {},
                                                             kSilu, {}, arena);
  Buffer<bf16, space::cuda> y(4 * 128);
  call.batch.rows = make_rows(call.batch.rows.data_handle(), 4, 128);  // as if a code were a byte
  auto const error = moe_test::error_of([&] { kernel.apply(call.batch, make_rows(y.data(), 4, std::int64_t{128}), nullptr); });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::argument);
  EXPECT_EQ(error->message(), "hopper_w4a16: columns of x: 128, expected 64");
}

template <class Quant, class Experts>
constexpr bool kTakes = Experts::template supports_quantization<Quant>();
using quantization::MxRule;
static_assert(kTakes<quantization::Mxfp8<MxRule::ceil, MxRule::even>, experts::HopperW8A16>);
static_assert(!kTakes<quantization::Mxfp8<MxRule::ocp>, experts::HopperW8A16> && !kTakes<quantization::Mxfp4<MxRule::even>, W4>);
static_assert(!kTakes<quantization::Mxfp8<>, W4> && !kTakes<quantization::Nvfp4, experts::HopperW8A16>);

}  // namespace
