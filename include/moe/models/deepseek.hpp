// SPDX-License-Identifier: Apache-2.0
// models/deepseek.hpp: DeepSeek-V2, -V3 and -V4.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// DeepSeek-V2-Lite
struct DeepSeek_V2_Lite : ModelDefaults {
  static constexpr char const* kName = "DeepSeek-V2-Lite";
  using Router = routing::SoftmaxTopK<routing::Renormalize::no>;
  static constexpr int hidden = 2048;
  static constexpr int intermediate = 1408;
  static constexpr int num_experts = 64;
  static constexpr int topk = 6;
  static constexpr int num_layers = 27;
  static constexpr int first_moe_layer = 1;
  static constexpr int num_shared_experts = 2;
  static constexpr int shared_intermediate = 2816;
};

/// DeepSeek-V2: the factor applies without renormalisation.
struct DeepSeek_V2 : ModelDefaults {
  static constexpr char const* kName = "DeepSeek-V2";
  using Router = routing::GroupedTopK<routing::Scoring::softmax, routing::GroupScore::max, routing::Renormalize::no>;
  static constexpr int hidden = 5120;
  static constexpr int intermediate = 1536;
  static constexpr int num_experts = 160;
  static constexpr int topk = 6;
  static constexpr int num_layers = 60;
  static constexpr int first_moe_layer = 1;
  static constexpr int num_shared_experts = 2;
  static constexpr int shared_intermediate = 3072;
  static constexpr int num_expert_group = 8;
  static constexpr int topk_group = 3;
  static constexpr float routed_scaling_factor = 16.0F;
};

/// DeepSeek-V3 and R1
struct DeepSeek_V3 : ModelDefaults {
  static constexpr char const* kName = "DeepSeek-V3";
  using Router = routing::GroupedTopK<routing::Scoring::sigmoid, routing::GroupScore::top2_sum, routing::Renormalize::yes>;
  static constexpr int hidden = 7168;
  static constexpr int intermediate = 2048;
  static constexpr int num_experts = 256;
  static constexpr int topk = 8;
  static constexpr int num_layers = 61;
  static constexpr int first_moe_layer = 3;
  static constexpr int num_shared_experts = 1;
  static constexpr int shared_intermediate = 2048;
  static constexpr int num_expert_group = 8;
  static constexpr int topk_group = 4;
  static constexpr float routed_scaling_factor = 2.5F;
  static constexpr bool has_selection_bias = true;  ///< a layer without one is refused
};

/// DeepSeek-V4-Flash: the first layers choose by a table of token ids.
struct DeepSeek_V4_Flash : ModelDefaults {
  static constexpr char const* kName = "DeepSeek-V4-Flash";
  using Router = routing::BiasedTopK<routing::Scoring::sqrtsoftplus, routing::Renormalize::yes>;
  using Activation = activation::Fixed<activation::Kind::silu_clamped>;
  static constexpr int hidden = 4096;
  static constexpr int intermediate = 2048;
  static constexpr int num_experts = 256;
  static constexpr int topk = 6;
  static constexpr int num_layers = 43;
  static constexpr int num_hash_layers = 3;
  static constexpr int num_shared_experts = 1;
  static constexpr int shared_intermediate = 2048;
  static constexpr float routed_scaling_factor = 1.5F;
  static constexpr float activation_limit = 10.0F;
};

/// DeepSeek-V4-Pro
struct DeepSeek_V4_Pro : DeepSeek_V4_Flash {
  static constexpr char const* kName = "DeepSeek-V4-Pro";
  static constexpr int hidden = 7168;
  static constexpr int intermediate = 3072;
  static constexpr int num_experts = 384;
  static constexpr int num_layers = 61;
  static constexpr int shared_intermediate = 3072;
  static constexpr float routed_scaling_factor = 2.5F;
};

}  // namespace moe::models
