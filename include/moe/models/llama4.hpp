// SPDX-License-Identifier: Apache-2.0
// models/llama4.hpp: Llama-4.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// Llama-4-Scout
struct Llama4_Scout : ModelDefaults {
  static constexpr char const* kName = "Llama-4-Scout";
  using Router = routing::Llama4;
  static constexpr int hidden = 5120;
  static constexpr int intermediate = 8192;
  static constexpr int num_experts = 16;
  static constexpr int topk = 1;
  static constexpr int num_layers = 48;
  static constexpr int num_shared_experts = 1;
  static constexpr int shared_intermediate = 8192;
  static constexpr bool weight_on_input = true;
};

/// Llama-4-Maverick
struct Llama4_Maverick : Llama4_Scout {
  static constexpr char const* kName = "Llama-4-Maverick";
  static constexpr int num_experts = 128;
  static constexpr int first_moe_layer = 1;
  static constexpr int moe_layer_step = 2;
};

}  // namespace moe::models
