// SPDX-License-Identifier: Apache-2.0
// tests/capi/export_preset.cpp: moe.h over the layers of a preset's library: float32 rows, the model's bfloat16 weights or their codes.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/capi/tensors.hpp"

namespace {

using namespace moe_test;

/// The model of tests/model_library/preset_model.hpp.
struct Preset {
  Preset() {
    fill(w13, 1, 0.1F);
    fill(w2, 2, 0.1F);
    weights.w13 = &w13;
    weights.w2 = &w2;
    router.renorm = "sum";
    config = a.config();
    config.router = &router;
    config.dtype = "float32";  // of hidden: the weights have another
    EXPECT_EQ(moe_group_create_self(&group), MOE_OK);
  }
  ~Preset() {
    EXPECT_EQ(moe_runner_destroy(runner), MOE_OK);
    EXPECT_EQ(moe_group_destroy(group), MOE_OK);
  }
  Preset(Preset const&) = delete;
  Preset& operator=(Preset const&) = delete;
  moe_status create() { return moe_runner_create(&config, &weights, group, &runner); }
  moe_status forward() { return moe_runner_forward(runner, &a.hidden, &a.logits, &a.output, nullptr, nullptr); }
  /// By the definition, with the routing of moe_route().
  std::vector<double> expected(std::vector<float> const& wide13, std::vector<float> const& wide2) {
    moe_router_config own = router;
    own.num_experts = config.num_experts;
    own.topk = config.topk;
    EXPECT_EQ(moe_route(&own, &a.logits, nullptr, &a.ids, &a.weights, nullptr), MOE_OK) << moe_last_error();
    return reference(a.sizes, a.hidden.values(), wide13, wide2, a.ids.values(), a.weights.values());
  }

  LayerArrays<float> a;
  Array<moe::bf16> w13{{8, 256, 64}}, w2{{8, 64, 128}};
  moe_weights weights = MOE_WEIGHTS_INIT;
  moe_router_config router = MOE_ROUTER_CONFIG_INIT;
  moe_runner_config config = MOE_RUNNER_CONFIG_INIT;
  moe_group_t group = nullptr;
  moe_runner_t runner = nullptr;
};

TEST(ExportPreset, DecodeLayer) {
  Preset p;
  ASSERT_EQ(p.create(), MOE_OK) << moe_last_error();
  for (int repeat = 0; repeat < 2; ++repeat) {
    ASSERT_EQ(p.forward(), MOE_OK) << moe_last_error();
    EXPECT_LT(relative_error(p.a.output.values(), p.expected(widened(p.w13.values()), widened(p.w2.values()))), 1e-5);
  }
  moe_runner_info info = MOE_RUNNER_INFO_INIT;
  ASSERT_EQ(moe_runner_get_info(p.runner, &info), MOE_OK) << moe_last_error();
  EXPECT_STREQ(info.dtype, "float32");
  EXPECT_STREQ(info.quantization, "none");
  EXPECT_STREQ(info.backend, "no_expert_parallel");
  EXPECT_STREQ(info.experts, "onednn");
  EXPECT_EQ(moe_runner_forward(p.runner, &p.a.hidden, &p.a.logits, &p.a.hidden, nullptr, nullptr), MOE_E_ARG);
}

TEST(ExportPreset, RoutedByTheCaller) {
  Preset p;
  p.config.router = nullptr;
  ASSERT_EQ(p.create(), MOE_OK) << moe_last_error();
  ASSERT_EQ(moe_runner_forward_routed(p.runner, &p.a.hidden, &p.a.ids, &p.a.weights, &p.a.output, nullptr, nullptr), MOE_OK)
      << moe_last_error();
  std::vector<double> const expected =
      reference(p.a.sizes, p.a.hidden.values(), widened(p.w13.values()), widened(p.w2.values()), p.a.ids.values(), p.a.weights.values());
  EXPECT_LT(relative_error(p.a.output.values(), expected), 1e-5);
}

TEST(ExportPreset, LayerOfAnotherScheme) {
  Preset p;
  Array<std::uint8_t> c13({8, 256, 64}), c2({8, 64, 128}), none({1});
  Array<float> s13({8, 2, 1}), s2({8, 1, 1});
  ASSERT_EQ(moe_quantize("fp8_block128", &p.w13, &c13, &s13), MOE_OK) << moe_last_error();
  ASSERT_EQ(moe_quantize("fp8_block128", &p.w2, &c2, &s2), MOE_OK) << moe_last_error();
  p.weights.w13 = &c13;
  p.weights.w2 = &c2;
  p.weights.w13_scale = &s13;
  p.weights.w2_scale = &s2;
  p.config.quantization = "fp8_block128";
  ASSERT_EQ(p.create(), MOE_OK) << moe_last_error();
  ASSERT_EQ(p.forward(), MOE_OK) << moe_last_error();
  std::vector<double> const expected =
      p.expected(dequantized("fp8_block128", c13, s13, none, 256, 64), dequantized("fp8_block128", c2, s2, none, 64, 128));
  EXPECT_LT(relative_error(p.a.output.values(), expected), 0.05);  // activations are e4m3, too
}

TEST(ExportPreset, AnyOtherLayerIsRefused) {
  auto refused = [](auto spoil, moe_status status, char const* part) {
    Preset p;
    spoil(p);
    EXPECT_EQ(p.create(), status) << part;
    EXPECT_NE(std::string(moe_last_error()).find(part), std::string::npos) << moe_last_error();
  };
  refused([](Preset& p) { p.config.hidden = 32; }, MOE_E_CONFIG, "hidden: 32 was given, but the layer's type fixes it to 64");
  refused([](Preset& p) { p.config.activation = "gelu"; }, MOE_E_CONFIG, "fixes it to silu");
  refused([](Preset& p) { p.router.renorm = "none"; }, MOE_E_CONFIG, "router.renorm");
  refused([](Preset& p) { p.config.dtype = nullptr; }, MOE_E_CONFIG,
          "config: bfloat16, none, no_expert_parallel on host is none of this library's layers: float32, none, no_expert_parallel, onednn "
          "on host; float32, fp8_block128, no_expert_parallel, onednn on host");
  refused([](Preset& p) { p.weights.w13 = &p.a.w13; }, MOE_E_ARG, "w13: dtype is float32, expected bfloat16");
}

TEST(ExportPreset, WhatTheLibraryIs) {
  EXPECT_STREQ(moe_version(), MOE_TEST_VERSION);
  EXPECT_EQ(moe_abi_version(), MOE_C_ABI_VERSION);
  EXPECT_EQ(moe_has("onednn"), 1);
}

}  // namespace
