// SPDX-License-Identifier: Apache-2.0
// models/phi.hpp: Phi-3.5-MoE.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// Phi-3.5-MoE
struct Phi3_5_MoE : ModelDefaults {
  static constexpr char const* kName = "Phi-3.5-MoE";
  using Router = routing::SparseMixer;
  static constexpr int hidden = 4096;
  static constexpr int intermediate = 6400;
  static constexpr int num_experts = 16;
  static constexpr int topk = 2;
  static constexpr int num_layers = 32;
  static constexpr float router_jitter_noise = 0.01F;
};

}  // namespace moe::models
