// SPDX-License-Identifier: Apache-2.0
// tests/model_library/model_library_test.cpp: uses a layer that was instantiated in a library.
#include <gtest/gtest.h>

#include <moe_test_models.hpp>
#include <vector>

namespace {

using Layer = moe::ModularKernel<moe_test::SmallConfig, moe_test::SmallRouter, moe::quantization::None, moe::backends::NoExpertParallel<>,
                                 moe::experts::OneDnn>;

TEST(ModelLibrary, LayerComesFromTheLibrary) {
  // Expert e multiplies by e + 1 in its first product: relu²(16 (e + 1)) in every one of 8 columns, summed by the second.
  moe::experts::WeightStore<moe_test::SmallConfig, moe::quantization::None> weights(4, 16, 8, false);
  std::vector<float> const w2(16 * 8, 1.0F);
  for (int e = 0; e < 4; ++e) {
    std::vector<float> const w1(8 * 16, static_cast<float>(e + 1));
    weights.set_expert(e, w1.data(), w2.data());
  }
  moe::comm::Self<> self;
  Layer layer(self, weights.view(),
              {.max_tokens_per_rank = 4, .placement = moe::ExpertPlacement(4, 1), .router = {.num_experts = 4, .topk = 1}});
  std::vector<float> const hidden(4 * 16, 1.0F);
  std::vector<float> logits(4 * 4, 0.0F);
  std::vector<float> output(4 * 16);
  for (std::size_t t = 0; t < 4; ++t) {
    logits[t * 4 + (3 - t)] = 1.0F;
  }
  layer.forward(moe::make_rows<16>(hidden.data(), 4, 16), moe::make_rows(static_cast<float const*>(logits.data()), 4, 4),
                moe::make_rows<16>(output.data(), 4, 16));
  for (std::size_t t = 0; t < 4; ++t) {
    float const first = 16.0F * static_cast<float>(4 - t);
    EXPECT_FLOAT_EQ(output[t * 16], 8.0F * first * first);
  }
  std::vector<std::int32_t> const ids = {0, 1, 2, 3};
  std::vector<float> const ones(4, 1.0F);
  layer.forward_routed(moe::make_rows<16>(hidden.data(), 4, 16), moe::make_rows(ids.data(), 4, 1), moe::make_rows(ones.data(), 4, 1),
                       moe::make_rows<16>(output.data(), 4, 16));
  for (std::size_t t = 0; t < 4; ++t) {
    float const first = 16.0F * static_cast<float>(t + 1);
    EXPECT_FLOAT_EQ(output[t * 16], 8.0F * first * first);
  }
}

}  // namespace
