// SPDX-License-Identifier: Apache-2.0
// models/hunyuan.hpp: Hunyuan.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// Hunyuan-A13B
struct Hunyuan_A13B : ModelDefaults {
  static constexpr char const* kName = "Hunyuan-A13B";
  using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
  static constexpr int hidden = 4096;
  static constexpr int intermediate = 3072;
  static constexpr int num_experts = 64;
  static constexpr int topk = 8;
  static constexpr int num_layers = 32;
  static constexpr int num_shared_experts = 1;
  static constexpr int shared_intermediate = 3072;
};

}  // namespace moe::models
