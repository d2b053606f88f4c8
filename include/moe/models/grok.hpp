// SPDX-License-Identifier: Apache-2.0
// models/grok.hpp: Grok-1.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// Grok-1: router logits are soft-capped at 30.
struct Grok_1 : ModelDefaults {
  static constexpr char const* kName = "Grok-1";
  using Router = routing::AnyRouter;
  using Activation = activation::Gelu;
  static constexpr int hidden = 6144;
  static constexpr int intermediate = 32768;
  static constexpr int num_experts = 8;
  static constexpr int topk = 2;
  static constexpr int num_layers = 64;
  static constexpr float logit_softcap = 30.0F;
};

}  // namespace moe::models
