// SPDX-License-Identifier: Apache-2.0
// models/jamba.hpp: Jamba-1.5.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// Jamba-1.5-Mini
struct Jamba1_5_Mini : ModelDefaults {
  static constexpr char const* kName = "Jamba-1.5-Mini";
  using Router = routing::SoftmaxTopK<routing::Renormalize::no>;
  static constexpr int hidden = 4096;
  static constexpr int intermediate = 14336;
  static constexpr int num_experts = 16;
  static constexpr int topk = 2;
  static constexpr int num_layers = 32;
  static constexpr int first_moe_layer = 1;
  static constexpr int moe_layer_step = 2;
};

/// Jamba-1.5-Large
struct Jamba1_5_Large : Jamba1_5_Mini {
  static constexpr char const* kName = "Jamba-1.5-Large";
  static constexpr int hidden = 8192;
  static constexpr int intermediate = 24576;
  static constexpr int num_layers = 72;
};

}  // namespace moe::models
