// SPDX-License-Identifier: Apache-2.0
// models/runtime_layer.hpp: the layer whose dimensions and activation are all known only at run time: one instantiation, any checkpoint.
#pragma once

#include "moe/activation/activation.hpp"
#include "moe/core/layer_config.hpp"

namespace moe::models {

template <class ActType, class WeightType>
struct RuntimeLayer : LayerDefaults {
  using Act = ActType;
  using Weight = WeightType;
  using Activation = activation::Any;
  static constexpr ExpertNorm expert_norm = ExpertNorm::if_given;
};

}  // namespace moe::models
