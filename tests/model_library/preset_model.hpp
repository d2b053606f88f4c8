// SPDX-License-Identifier: Apache-2.0
// tests/model_library/preset_model.hpp: a small model with shared experts, as a user's own preset.
#pragma once

#include <moe/models/model_defaults.hpp>
#include <moe/models/preset_choice.hpp>
#include <moe/routing/softmax_topk.hpp>

namespace moe_test {

struct SmallModel : moe::models::ModelDefaults {
  static constexpr char const* kName = "small";
  using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;
  static constexpr int hidden = 64, intermediate = 128, num_experts = 8, topk = 2;
  static constexpr int num_shared_experts = 1, shared_intermediate = 32;
};

}  // namespace moe_test

template <>
struct moe::models::PresetChoice<moe_test::SmallModel> : moe::models::OneGpu<moe::quantization::None> {};
