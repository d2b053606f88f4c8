// SPDX-License-Identifier: Apache-2.0
// models/minimax.hpp: MiniMax-M2.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// MiniMax-M2
struct MiniMax_M2 : ModelDefaults {
  static constexpr char const* kName = "MiniMax-M2";
  using Router = routing::BiasedTopK<routing::Scoring::sigmoid, routing::Renormalize::yes>;
  static constexpr int hidden = 3072;
  static constexpr int intermediate = 1536;
  static constexpr int num_experts = 256;
  static constexpr int topk = 8;
  static constexpr int num_layers = 62;
};

}  // namespace moe::models
