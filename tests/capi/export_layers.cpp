// SPDX-License-Identifier: Apache-2.0
// tests/capi/export_layers.cpp: moe.h over a model library, without libmoe: its layer runs, and any other is refused.
#include <gtest/gtest.h>

#include "tests/capi/small_layer.hpp"

namespace {

using moe_test::Array;
using moe_test::Small;

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
