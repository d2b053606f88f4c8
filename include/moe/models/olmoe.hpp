// SPDX-License-Identifier: Apache-2.0
// models/olmoe.hpp: OLMoE.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// OLMoE-1B-7B
struct OLMoE_1B_7B : ModelDefaults {
  static constexpr char const* kName = "OLMoE-1B-7B";
  using Router = routing::SoftmaxTopK<routing::Renormalize::no>;
  static constexpr int hidden = 2048;
  static constexpr int intermediate = 1024;
  static constexpr int num_experts = 64;
  static constexpr int topk = 8;
  static constexpr int num_layers = 16;
};

}  // namespace moe::models
