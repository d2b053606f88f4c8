// SPDX-License-Identifier: Apache-2.0
// models/longcat.hpp: LongCat-Flash.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// LongCat-Flash
struct LongCat_Flash : ModelDefaults {
  static constexpr char const* kName = "LongCat-Flash";
  using Router = routing::ZeroExpert<routing::Scoring::softmax, routing::Renormalize::no>;
  static constexpr int hidden = 6144;
  static constexpr int intermediate = 2048;
  static constexpr int num_experts = 512;
  static constexpr int topk = 12;
  static constexpr int num_layers = 28;
  static constexpr int num_zero_experts = 256;
  static constexpr float routed_scaling_factor = 6.0F;
};

}  // namespace moe::models
