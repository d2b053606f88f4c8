// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_masked_test.cu: compositions with HopperMasked, the batched format, against the device oracle in the same composition
// and against HopperContiguous. Rows past the counts hold NaN.
#include <gtest/gtest.h>

#include "batched_exchange.cuh"
#include "hopper_composition.cuh"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int8_per_token.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/device/route.cuh"

namespace {

using namespace moe;
using namespace moe_test;

template <class P>
class HopperMasked : public testing::Test {
 protected:
  using Act = typename P::Act;
  using Quant = typename P::Quant;
  template <class Experts>
  using Case = CompositionUnderTest<Act, Quant, LocalBatches, Experts>;

  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
  static double tolerance() { return composition_tolerance<Quant>(); }
};

using All = testing::Types<Types<bf16, quantization::None>, Types<f16, quantization::None>, Types<bf16, quantization::Fp8Block<>>,
                           Types<bf16, quantization::Fp8PerToken<>>, Types<bf16, quantization::Int8PerToken>>;
TYPED_TEST_SUITE(HopperMasked, All);

TYPED_TEST(HopperMasked, X5_X6_EqualsOracle) {
  LayerCase const c{.bias = true};
  typename TestFixture::template Case<experts::CudaReference> oracle(c, 200);
  typename TestFixture::template Case<experts::HopperMasked> layer(c, 200);
  for (int rows : {1, 9, 64, 200, 0}) {
    auto const want = oracle.forward(rows, 30 + static_cast<unsigned>(rows));
    auto const got = layer.forward(rows, 30 + static_cast<unsigned>(rows));
    EXPECT_LT(relative_error(got, want), rows < 8 ? 3 * this->tolerance() : this->tolerance()) << rows << " rows";
  }
}

TYPED_TEST(HopperMasked, BatchedEqualsStandard) {
  LayerCase const c{.activation = activation::Kind::gelu_tanh};
  CompositionUnderTest<typename TypeParam::Act, typename TypeParam::Quant, backends::NoExpertParallel<space::cuda>,
                       experts::HopperContiguous>
      standard(c, 150);
  typename TestFixture::template Case<experts::HopperMasked> batched(c, 150);
  for (int rows : {2, 150}) {
    auto const want = standard.forward(rows, 40);
    EXPECT_LT(relative_error(batched.forward(rows, 40), want), 4e-3) << rows << " rows";  // weights before or after the rounding of a slot
  }
}

TYPED_TEST(HopperMasked, RowsMayBeGatheredByIndex) {
  LayerCase const c{.topk = 3};
  typename TestFixture::template Case<experts::HopperMasked> batched(c, 100);
  CompositionUnderTest<typename TypeParam::Act, typename TypeParam::Quant, GatheredBatches, experts::HopperMasked> gathered(c, 100);
  for (int rows : {1, 100}) EXPECT_TRUE(gathered.forward(rows, 70) == batched.forward(rows, 70)) << rows << " rows";
}

TYPED_TEST(HopperMasked, X19_ReplayFollowsTheCountsOnTheDevice) {
  using Hopper = typename TestFixture::template Case<experts::HopperMasked>;
  Hopper captured({}, 64);
  Hopper direct({}, 64);
  expect_replays(captured, direct, 64);
}

}  // namespace
