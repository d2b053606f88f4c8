// SPDX-License-Identifier: Apache-2.0
// models/kimi.hpp: Kimi-K2 and Kimi-K3.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// Kimi-K2
struct Kimi_K2 : ModelDefaults {
  static constexpr char const* kName = "Kimi-K2";
  using Router = routing::BiasedTopK<routing::Scoring::sigmoid, routing::Renormalize::yes>;
  static constexpr int hidden = 7168;
  static constexpr int intermediate = 2048;
  static constexpr int num_experts = 384;
  static constexpr int topk = 8;
  static constexpr int num_layers = 61;
  static constexpr int first_moe_layer = 1;
  static constexpr int num_shared_experts = 1;
  static constexpr int shared_intermediate = 2048;
  static constexpr float routed_scaling_factor = 2.827F;
};

/// Kimi-K3: the routed experts work on a projection of the token, which is what the layer sees.
struct Kimi_K3 : ModelDefaults {
  static constexpr char const* kName = "Kimi-K3";
  using Router = routing::BiasedTopK<routing::Scoring::sigmoid, routing::Renormalize::yes>;
  using Activation = activation::Fixed<activation::Kind::situ>;
  static constexpr float situ_gate = 4.0F;
  static constexpr float situ_up = 25.0F;
  static constexpr int hidden = 3584;
  static constexpr int block_hidden = 7168;
  static constexpr int intermediate = 3072;
  static constexpr int num_experts = 896;
  static constexpr int topk = 16;
  static constexpr int num_layers = 93;
  static constexpr int first_moe_layer = 1;
  static constexpr int num_shared_experts = 2;
  static constexpr int shared_intermediate = 6144;
};

}  // namespace moe::models
