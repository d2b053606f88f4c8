// SPDX-License-Identifier: Apache-2.0
// models/gpt_oss.hpp: gpt-oss.
#pragma once

#include "moe/models/model_defaults.hpp"
#include "moe/routing/routers.hpp"

namespace moe::models {

/// gpt-oss-20b: gate and up are de-interleaved at load.
struct GptOss_20B : ModelDefaults {
  static constexpr char const* kName = "gpt-oss-20b";
  using Router = routing::TopKSoftmax;
  using Activation = activation::SwigluOai;
  static constexpr int hidden = 2880;
  static constexpr int intermediate = 2880;
  static constexpr int num_experts = 32;
  static constexpr int topk = 4;
  static constexpr int num_layers = 24;
  static constexpr bool router_bias = true;
  static constexpr bool expert_bias = true;
  static constexpr float activation_alpha = 1.702F;
  static constexpr float activation_limit = 7.0F;
};

/// gpt-oss-120b
struct GptOss_120B : GptOss_20B {
  static constexpr char const* kName = "gpt-oss-120b";
  static constexpr int num_experts = 128;
  static constexpr int num_layers = 36;
};

}  // namespace moe::models
