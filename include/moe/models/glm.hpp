// SPDX-License-Identifier: Apache-2.0
// models/glm.hpp: GLM-4.5 and 4.6.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// GLM-4.5 and 4.6 (355B)
struct GLM_4_5 : ModelDefaults {
  static constexpr char const* kName = "GLM-4.5";
  using Router = routing::BiasedTopK<routing::Scoring::sigmoid, routing::Renormalize::yes>;
  static constexpr int hidden = 5120;
  static constexpr int intermediate = 1536;
  static constexpr int num_experts = 160;
  static constexpr int topk = 8;
  static constexpr int num_layers = 92;
  static constexpr int first_moe_layer = 3;
  static constexpr int num_shared_experts = 1;
  static constexpr int shared_intermediate = 1536;
  static constexpr float routed_scaling_factor = 2.5F;
};

/// GLM-4.5-Air
struct GLM_4_5_Air : GLM_4_5 {
  static constexpr char const* kName = "GLM-4.5-Air";
  static constexpr int hidden = 4096;
  static constexpr int intermediate = 1408;
  static constexpr int num_experts = 128;
  static constexpr int topk = 8;
  static constexpr int num_layers = 46;
  static constexpr int first_moe_layer = 1;
  static constexpr int shared_intermediate = 1408;
  static constexpr float routed_scaling_factor = 1.0F;
};

}  // namespace moe::models
