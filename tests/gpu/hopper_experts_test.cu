// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_experts_test.cu: compositions with HopperContiguous against the same compositions with the device oracle: every
// quantisation that it takes, every activation, biases, weights on the input, no rows, launches, graph replay.
#include <gtest/gtest.h>

#include "hopper_composition.cuh"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_tensor.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int8_per_token.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/device/route.cuh"

namespace {

using namespace moe;
using namespace moe_test;
using activation::Kind;
using quantization::Fp8Block;
using quantization::Fp8PerTensor;
using quantization::Fp8PerTensorStatic;
using quantization::Fp8PerToken;
using quantization::Int8PerTensorStatic;
using quantization::Int8PerToken;
using quantization::None;
using Local = backends::NoExpertParallel<space::cuda>;

template <class P>
class HopperExperts : public testing::Test {
 protected:
  using Act = typename P::Act;
  using Quant = typename P::Quant;
  template <class Experts>
  using Case = CompositionUnderTest<Act, Quant, Local, Experts>;

  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
  static double tolerance() { return composition_tolerance<Quant>(); }
  static Quant quant() {
    if constexpr (std::is_same_v<Quant, Fp8PerTensorStatic>) {
      return Quant(typename Quant::Params{.scale = 4.0F / 448.0F});
    } else if constexpr (std::is_same_v<Quant, Int8PerTensorStatic>) {
      return Quant(typename Quant::Params{.scale = 4.0F / 127.0F});
    } else {
      return {};
    }
  }
  static void compare(LayerCase const& c, std::vector<int> const& row_counts) {
    Case<experts::CudaReference> oracle(c, 300, quant());
    Case<experts::HopperContiguous> layer(c, 300, quant());
    for (int rows : row_counts) {
      auto const want = oracle.forward(rows, 10 + static_cast<unsigned>(rows));
      auto const got = layer.forward(rows, 10 + static_cast<unsigned>(rows));
      EXPECT_LT(relative_error(got, want), rows < 8 ? 3 * tolerance() : tolerance())
          << rows << " rows, " << activation::name(c.activation) << ", H " << c.hidden << " I " << c.intermediate << " k " << c.topk;
    }
  }
};

using All =
    testing::Types<Types<bf16, None>, Types<f16, None>, Types<bf16, Fp8Block<>>, Types<bf16, Fp8PerToken<>>, Types<bf16, Fp8PerTensor<>>,
                   Types<bf16, Fp8PerTensorStatic>, Types<bf16, Int8PerToken>, Types<bf16, Int8PerTensorStatic>>;
struct Names {
  template <class P>
  static std::string GetName(int) {
    return std::string(std::is_same_v<typename P::Act, bf16> ? "bf16_" : "f16_") + P::Quant::kName;
  }
};
TYPED_TEST_SUITE(HopperExperts, All, Names);

TYPED_TEST(HopperExperts, X3_EqualsOracle) {
  this->compare({}, {0, 1, 7, 33, 64, 128, 222, 300});
  this->compare({.hidden = 512, .intermediate = 128, .experts = 64, .topk = 6}, {1, 200});
  this->compare({.hidden = 128, .intermediate = 256, .experts = 8, .topk = 1}, {2, 150});
}

TYPED_TEST(HopperExperts, X2_X9_EveryActivationWithBiases) {
  for (int k = 0; k < activation::kKinds; ++k) {
    LayerCase c{.experts = 8, .topk = 2, .activation = static_cast<Kind>(k), .bias = true, .seed = static_cast<unsigned>(20 + k)};
    c.constants.limit = 1.5F;
    this->compare(c, {5, 60});
  }
  LayerCase gpt_oss{.hidden = 384, .intermediate = 384, .activation = Kind::swigluoai_halves, .bias = true};
  gpt_oss.constants.limit = 7.0F;
  this->compare(gpt_oss, {1, 100});
}

TYPED_TEST(HopperExperts, X8_WeightOnTheInput) {
  for (int k : {1, 2}) this->compare({.experts = 8, .topk = k, .bias = true, .weight_on_input = true}, {3, 90});
}

TYPED_TEST(HopperExperts, X13_WidthsThatAreNotMultiplesOfATile) {
  int const inter = std::is_same_v<typename TypeParam::Quant, Fp8Block<>> ? 128 : 80;
  this->compare({.hidden = 80, .intermediate = inter, .experts = 8, .topk = 2, .bias = true}, {1, 40});
}

TYPED_TEST(HopperExperts, X19_ReplaysAfterNewInputs) {
  using Hopper = typename TestFixture::template Case<experts::HopperContiguous>;
  Hopper captured({}, 64, this->quant());
  Hopper direct({}, 64, this->quant());
  expect_replays(captured, direct, 64);
  // Route, quantise where the scheme does, align, both products, sum over the slots.
  EXPECT_LE(captured.launches(64), TestFixture::Quant::kQuantizesActivations ? 5U : 4U);
}

TYPED_TEST(HopperExperts, X6_X19_X21_ReplayFollowsTheRowCountOnTheDeviceAndPaddingIsIgnored) {
  using Hopper = typename TestFixture::template Case<experts::HopperContiguous>;
  Hopper captured({}, 300, this->quant());
  Hopper direct({}, 300, this->quant());
  Buffer<std::int32_t, space::cuda> count(1);
  auto const set = [&](std::int32_t rows) { count.copy_from_host(&rows); };
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  set(300);
  captured.fill(1);
  captured.launch(300, stream, {.num_rows = count.data()});
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  captured.launch(300, stream, {.num_rows = count.data()});
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (int rows : {300, 1, 0, 77}) {
    set(rows);
    captured.fill(static_cast<unsigned>(50 + rows));
    captured.poison_input(rows);
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    auto const got = captured.output();
    auto const want = direct.forward(300, static_cast<unsigned>(50 + rows));
    auto const end = static_cast<std::size_t>(rows) * 256;
    EXPECT_LT(relative_error(got, want, end),
              rows < 8 ? 3 * this->tolerance() : 4e-3)  // for few rows K is split: another order of the sums
        << rows << " rows";
    for (std::size_t i = end; i < got.size(); ++i) ASSERT_TRUE(std::isnan(got[i])) << "a row past the count was written";
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST(HopperExpertsFp8, RowsThatStayAreQuantizedByTheKernels) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  using Deferred = CompositionUnderTest<bf16, Fp8Block<>, Local, experts::HopperContiguous, activation::Silu, 256>;
  static_assert(std::is_same_v<Deferred::Layer::RowQuant, None>);
  CompositionUnderTest<bf16, Fp8Block<>, Local, experts::CudaReference> oracle({.bias = true}, 1500);
  Deferred layer({.bias = true}, 1500);
  for (int rows : {0, 1, 40, 1500}) {
    auto const want = oracle.forward(rows, 60 + static_cast<unsigned>(rows));
    EXPECT_LT(relative_error(layer.forward(rows, 60 + static_cast<unsigned>(rows)), want), rows < 8 ? 3e-2 : 1e-2) << rows << " rows";
  }
  EXPECT_LE(layer.launches(300), 4U);  // route, align and quantise, both products, sum over the slots
  auto const packed = layer.forward(200, 9);
  EXPECT_TRUE(layer.forward_apart(200, 9) == packed) << "rows of x that are apart";
}

TYPED_TEST(HopperExperts, OutputMayBeTheInput) {
  using Hopper = typename TestFixture::template Case<experts::HopperContiguous>;
  for (int k : {1, 4}) {
    Hopper layer({.topk = k}, 200, this->quant());
    auto const want = layer.forward(200, 8);
    layer.fill(8);
    layer.launch_in_place(200, nullptr);
    EXPECT_TRUE(layer.output() == want) << "top " << k;
  }
}

TYPED_TEST(HopperExperts, X20_ARowAloneIsTheRowAmongOthersInABatchInvariantLayer) {
  CompositionUnderTest<typename TestFixture::Act, typename TestFixture::Quant, Local, experts::HopperContiguous, activation::Any, dynamic,
                       true>
      layer({.hidden = 512, .intermediate = 384}, 300, this->quant());
  auto const many = layer.forward(300, 3);
  for (int rows : {1, 5, 40}) {
    auto const few = layer.forward(rows, 3);
    EXPECT_TRUE(std::equal(few.begin(), few.end(), many.begin())) << rows << " rows";
  }
}

}  // namespace
