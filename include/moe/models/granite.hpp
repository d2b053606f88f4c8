// SPDX-License-Identifier: Apache-2.0
// models/granite.hpp: Granite-3.0 MoE.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// Granite-3.0-1b-a400m
struct Granite3_1B_A400M : ModelDefaults {
  static constexpr char const* kName = "Granite-3.0-1b-a400m";
  using Router = routing::TopKSoftmax;
  static constexpr int hidden = 1024;
  static constexpr int intermediate = 512;
  static constexpr int num_experts = 32;
  static constexpr int topk = 8;
  static constexpr int num_layers = 24;
};

/// Granite-3.0-3b-a800m
struct Granite3_3B_A800M : Granite3_1B_A400M {
  static constexpr char const* kName = "Granite-3.0-3b-a800m";
  static constexpr int hidden = 1536;
  static constexpr int num_experts = 40;
  static constexpr int num_layers = 32;
};

}  // namespace moe::models
