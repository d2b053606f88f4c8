// SPDX-License-Identifier: Apache-2.0
// tests/capi/export_layers.cpp: moe.h over a model library, without libmoe: its layer runs, and any other is refused.
#include <gtest/gtest.h>

#include "tests/capi/tensors.hpp"

namespace {

using moe_test::Array;

struct Small {
  Small() {
    for (float& v : w2.values()) v = 1.0F;
    for (float& v : hidden.values()) v = 1.0F;
    for (std::int64_t i = 0; i < w13.size(); ++i) w13[i] = static_cast<float>(i / (8 * 16) + 1);  // expert e multiplies by e + 1
    for (std::int64_t t = 0; t < 4; ++t) logits[t * 4 + 3 - t] = 1.0F;
    weights.w13 = &w13;
    weights.w2 = &w2;
    router.renorm = "sum";
    config.router = &router;
    config.hidden = 16;
    config.intermediate = 8;
    config.num_experts = 4;
    config.topk = 1;
    config.max_tokens_per_rank = 4;
    config.activation = "relu2_no_mul";
    EXPECT_EQ(moe_group_create_self(&group), MOE_OK);
  }
  ~Small() {
    EXPECT_EQ(moe_runner_destroy(runner), MOE_OK);
    EXPECT_EQ(moe_group_destroy(group), MOE_OK);
  }
  Small(Small const&) = delete;
  Small& operator=(Small const&) = delete;
  moe_status create() { return moe_runner_create(&config, &weights, group, &runner); }

  Array<float> w13{{4, 8, 16}}, w2{{4, 16, 8}}, hidden{{4, 16}}, logits{{4, 4}}, output{{4, 16}};
  moe_weights weights = MOE_WEIGHTS_INIT;
  moe_router_config router = MOE_ROUTER_CONFIG_INIT;
  moe_runner_config config = MOE_RUNNER_CONFIG_INIT;
  moe_group_t group = nullptr;
  moe_runner_t runner = nullptr;
};

TEST(Export, LayerOfAModelLibrary) {
  Small s;
  ASSERT_EQ(s.create(), MOE_OK) << moe_last_error();
  ASSERT_EQ(moe_runner_forward(s.runner, &s.hidden, &s.logits, &s.output, nullptr, nullptr), MOE_OK) << moe_last_error();
  for (std::int64_t t = 0; t < 4; ++t) EXPECT_FLOAT_EQ(s.output[t * 16], 8.0F * 256.0F * static_cast<float>((4 - t) * (4 - t)));
  Array<moe::f16> half({4, 4});
  EXPECT_EQ(moe_runner_forward(s.runner, &s.hidden, &half, &s.output, nullptr, nullptr), MOE_E_ARG);
  EXPECT_STREQ(moe_last_error(), "E_ARG: router_logits: dtype is float16, expected float32 or bfloat16");
  Array<float> narrow({4, 8});
  EXPECT_EQ(moe_runner_forward(s.runner, &narrow, &s.logits, &s.output, nullptr, nullptr), MOE_E_ARG);
  EXPECT_NE(std::string(moe_last_error()).find("hidden: shape is [4, 8], expected [rows, 16]"), std::string::npos) << moe_last_error();
}

TEST(Export, AnyOtherLayerIsRefused) {
  auto refused = [](auto spoil, char const* part) {
    Small s;
    spoil(s);
    EXPECT_EQ(s.create(), MOE_E_CONFIG) << part;
    EXPECT_NE(std::string(moe_last_error()).find(part), std::string::npos) << moe_last_error();
  };
  refused([](Small& s) { s.config.hidden = 32; }, "hidden: 32 was given, but the layer's type fixes it to 16");
  refused([](Small& s) { s.config.activation = "relu_no_mul"; }, "fixes it to relu2_no_mul");
  refused([](Small& s) { s.router.renorm = "none"; }, "router.renorm");
  refused([](Small& s) { s.router.scoring = "sigmoid"; }, "router.scoring");
  refused([](Small& s) { s.config.quantization = "fp8_block128"; },
          "none of this library's layers: float32, none, no_expert_parallel, onednn");
}

TEST(Export, WhatTheLibraryIs) {
  EXPECT_STREQ(moe_version(), MOE_TEST_VERSION);
  EXPECT_EQ(moe_has("onednn"), 1);
}

}  // namespace
