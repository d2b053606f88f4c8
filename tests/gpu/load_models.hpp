// SPDX-License-Identifier: Apache-2.0
// tests/gpu/load_models.hpp: presets of the two bundled checkpoints, and of two that the test writes.
#pragma once

#include <moe/models/model_defaults.hpp>
#include <moe/models/preset_choice.hpp>
#include <moe/routing/grouped_topk.hpp>
#include <moe/routing/softmax_topk.hpp>

namespace moe_test {

struct TinyQwen : moe::models::ModelDefaults {
  static constexpr char const* kName = "TinyQwen";
  using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;
  static constexpr int hidden = 64, intermediate = 32, num_experts = 8, topk = 2;
};
struct TinyDeepSeek : moe::models::ModelDefaults {
  static constexpr char const* kName = "TinyDeepSeek";
  using Router =
      moe::routing::GroupedTopK<moe::routing::Scoring::sigmoid, moe::routing::GroupScore::top2_sum, moe::routing::Renormalize::yes>;
  static constexpr int hidden = 64, intermediate = 32, num_experts = 16, topk = 4;
  static constexpr int num_shared_experts = 1, shared_intermediate = 32, num_expert_group = 4, topk_group = 2;
  static constexpr float routed_scaling_factor = 2.5F;
};
/// Sizes that the quantised kernels take.
struct TinyPacked : moe::models::ModelDefaults {
  static constexpr char const* kName = "TinyPacked";
  using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;
  static constexpr int hidden = 256, intermediate = 128, num_experts = 6, topk = 2;
};
struct TinyPackedShared : TinyPacked {
  static constexpr char const* kName = "TinyPackedShared";
  static constexpr int num_shared_experts = 1, shared_intermediate = 384;
  static constexpr bool shared_sigmoid_gate = true;
};

}  // namespace moe_test
