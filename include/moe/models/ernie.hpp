// SPDX-License-Identifier: Apache-2.0
// models/ernie.hpp: ERNIE-4.5.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// ERNIE-4.5-21B-A3B: the bias takes part in choosing; weights are divided by max(sum, 1e-12).
struct Ernie4_5_21B_A3B : ModelDefaults {
  static constexpr char const* kName = "ERNIE-4.5-21B-A3B";
  using Router = routing::BiasedTopK<routing::Scoring::softmax, routing::Renormalize::yes>;
  static constexpr int hidden = 2560;
  static constexpr int intermediate = 1536;
  static constexpr int num_experts = 64;
  static constexpr int topk = 6;
  static constexpr int num_layers = 28;
  static constexpr routing::Renorm renorm = routing::Renorm::floor;
  static constexpr float renorm_eps = 1e-12F;
  static constexpr int first_moe_layer = 1;
  static constexpr int num_shared_experts = 2;
  static constexpr int shared_intermediate = 3072;
};

/// ERNIE-4.5-300B-A47B
struct Ernie4_5_300B_A47B : Ernie4_5_21B_A3B {
  static constexpr char const* kName = "ERNIE-4.5-300B-A47B";
  static constexpr int hidden = 8192;
  static constexpr int intermediate = 3584;
  static constexpr int num_experts = 64;
  static constexpr int topk = 8;
  static constexpr int num_layers = 54;
  static constexpr int first_moe_layer = 3;
  static constexpr int num_shared_experts = 0;
  static constexpr int shared_intermediate = 0;
};

}  // namespace moe::models
