// SPDX-License-Identifier: Apache-2.0
// tests/capi/small_layer.hpp: a call of the layer that tests/capi/export_library.cpp exports.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>

#include "tests/capi/tensors.hpp"

namespace moe_test {

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

}  // namespace moe_test
