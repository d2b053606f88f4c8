// SPDX-License-Identifier: Apache-2.0
// tests/unit/models_defaults_test.cpp: a layer of a preset computes with the preset's constants where its user gives none.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "../expect_error.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/comm/self.hpp"
#include "moe/experts/reference.hpp"
#include "moe/experts/weights.hpp"
#include "moe/models/catalog.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"

namespace {

using namespace moe;

/// A preset made small, in float.
template <class M>
struct Small : M {
  static constexpr int hidden = 32, intermediate = 32, num_experts = 8, topk = 2, num_expert_group = 0, topk_group = 0;
  using Act = float;
  using Weight = float;
};
template <class M>
using LayerOf = ModularKernel<Small<M>, typename M::Router, quantization::None, backends::NoExpertParallel<>, experts::Reference<>>;

/// Params without router and activation.
template <class M>
typename LayerOf<M>::Params plain_params() {
  return {.max_tokens_per_rank = 1, .placement = ExpertPlacement(8, 1)};
}
/// Output of a token of ones whose gate and up projections are 20 in every expert, and whose down projections take the mean.
template <class M>
float output_at_20(typename LayerOf<M>::Params const& params) {
  std::vector<float> const w13(64 * 32, 20.0F / 32), w2(32 * 32, 1.0F / 32), logits(8, 0.0F);
  std::vector<float> hidden(32, 1.0F), output(32);
  experts::WeightStore<Small<M>, quantization::None> weights(8, 32, 32, true);
  for (int e = 0; e < 8; ++e) weights.set_expert(e, w13.data(), w2.data());
  comm::Self<> self;
  LayerOf<M> layer(self, weights.view(), params);
  layer.forward(make_rows<32, float const>(hidden.data(), 1, 32), make_rows<dynamic, float const>(logits.data(), 1, 8),
                make_rows<32>(output.data(), 1, 32));
  return output[0];
}
float sigmoid(float x) { return 1.0F / (1.0F + std::exp(-x)); }

TEST(PresetDefaults, GptOssClampsAsTheModelDoes) {
  auto params = plain_params<models::GptOss_20B>();
  EXPECT_EQ(params.activation.constants.alpha, 1.702F);
  EXPECT_EQ(params.activation.constants.limit, 7.0F);
  EXPECT_EQ(params.router.num_experts, 8);
  EXPECT_EQ(params.router.topk, 2);
  EXPECT_NEAR(output_at_20<models::GptOss_20B>(params), 8 * 7 * sigmoid(1.702F * 7), 1e-3F) << "420 without the limit";
}

TEST(PresetDefaults, WhatTheUserGivesGoesFirst) {
  auto params = plain_params<models::GptOss_20B>();
  params.activation.constants.limit = 3.0F;
  EXPECT_NEAR(output_at_20<models::GptOss_20B>(params), 4 * 3 * sigmoid(1.702F * 3), 1e-3F);
}

TEST(PresetDefaults, DeepSeekV4ClampsAndScales) {
  std::vector<float> const bias(8, 0.0F);
  auto params = plain_params<models::DeepSeek_V4_Flash>();
  EXPECT_EQ(params.router.routed_scaling_factor, 1.5F);
  params.router.correction_bias = bias.data();
  EXPECT_NEAR(output_at_20<models::DeepSeek_V4_Flash>(params), 1.5F * 10 * sigmoid(10) * 10, 1e-2F);
}

// The router's type takes no bias as well; the model has one.
TEST(PresetDefaults, DeepSeekV3IsRefusedWithoutItsSelectionBias) {
  std::vector<float> const bias(8, 0.0F);
  auto params = plain_params<models::DeepSeek_V3>();
  params.router.num_expert_group = 4;
  params.router.topk_group = 2;
  moe_test::expect_error(ErrorCode::argument, ".router.correction_bias is null, expected 8 values",
                         [&] { output_at_20<models::DeepSeek_V3>(params); });
  params.router.correction_bias = bias.data();
  EXPECT_NEAR(output_at_20<models::DeepSeek_V3>(params), 2.5F * 20 * sigmoid(20) * 20, 1e-1F);
}

TEST(PresetDefaults, Llama4PutsTheWeightOnTheInput) {
  EXPECT_TRUE(default_shape<models::Llama4_Scout>().weight_on_input);
  EXPECT_FALSE(default_shape<models::Mixtral_8x7B>().weight_on_input);
}

TEST(PresetDefaults, ConstantsOfRouters) {
  auto const v3 = default_router_params<models::DeepSeek_V3, models::DeepSeek_V3::Router::Params>();
  EXPECT_EQ(v3.num_expert_group, 8);
  EXPECT_EQ(v3.topk_group, 4);
  EXPECT_EQ(v3.routed_scaling_factor, 2.5F);
  auto const ernie = default_router_params<models::Ernie4_5_21B_A3B, models::Ernie4_5_21B_A3B::Router::Params>();
  EXPECT_EQ(ernie.renorm, routing::Renorm::floor);
  EXPECT_EQ(ernie.renorm_eps, 1e-12F);
  auto const longcat = default_router_params<models::LongCat_Flash, models::LongCat_Flash::Router::Params>();
  EXPECT_EQ(longcat.num_zero_experts, 256);
  EXPECT_EQ((default_router_params<models::Grok_1, models::Grok_1::Router::Params>().logit_softcap), 30.0F);
  // A configuration that states only its dimensions keeps the defaults of the other values.
  auto const plain = default_router_params<LayerDefaults, routing::RouterConfig>();
  EXPECT_EQ(plain.num_experts, 0);
  EXPECT_EQ(plain.routed_scaling_factor, 1.0F);
}

}  // namespace
