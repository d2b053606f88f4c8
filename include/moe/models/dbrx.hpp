// SPDX-License-Identifier: Apache-2.0
// models/dbrx.hpp: DBRX.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// DBRX: weights are divided by their L1 norm.
struct Dbrx : ModelDefaults {
  static constexpr char const* kName = "DBRX";
  using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
  static constexpr int hidden = 6144;
  static constexpr int intermediate = 10752;
  static constexpr int num_experts = 16;
  static constexpr int topk = 4;
  static constexpr int num_layers = 40;
};

}  // namespace moe::models
