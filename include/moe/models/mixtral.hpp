// SPDX-License-Identifier: Apache-2.0
// models/mixtral.hpp: Mixtral.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// Mixtral-8x7B
struct Mixtral_8x7B : ModelDefaults {
  static constexpr char const* kName = "Mixtral-8x7B";
  using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
  static constexpr int hidden = 4096;
  static constexpr int intermediate = 14336;
  static constexpr int num_experts = 8;
  static constexpr int topk = 2;
  static constexpr int num_layers = 32;
};

/// Mixtral-8x22B
struct Mixtral_8x22B : Mixtral_8x7B {
  static constexpr char const* kName = "Mixtral-8x22B";
  static constexpr int hidden = 6144;
  static constexpr int intermediate = 16384;
  static constexpr int num_layers = 56;
};

}  // namespace moe::models
