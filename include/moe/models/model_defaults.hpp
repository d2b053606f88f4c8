// SPDX-License-Identifier: Apache-2.0
// models/model_defaults.hpp: what a model states beside the dimensions of its MoE layer, with the values that most models share.
#pragma once

#include "moe/activation/activation.hpp"
#include "moe/core/layer_config.hpp"

namespace moe::models {

/// A model is a struct of constexpr values that derives from this: a LayerConfig (core/layer_config.hpp) in bf16 with a silu gate, plus
/// what the rest of its MoE block and its layers look like. The values are those of the released config.json; a checkpoint's own
/// configuration takes precedence (io/layer_from_config.hpp). A value that the model does not have is 0. A layer uses these values if its
/// user gives no Params for the router or the activation (core/config_defaults.hpp).
struct ModelDefaults : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
  static constexpr int num_layers = dynamic;  ///< all layers, dense ones included
  static constexpr int first_moe_layer = 0;   ///< index of the first MoE layer
  static constexpr int moe_layer_step = 1;    ///< from there on, every n-th layer is an MoE layer
  static constexpr int num_shared_experts = 0;
  static constexpr int shared_intermediate = 0;       ///< total width of the shared experts
  static constexpr bool shared_sigmoid_gate = false;  ///< their output is multiplied by sigmoid(v . x)
  static constexpr int num_expert_group = 0;          ///< G of grouped routing
  static constexpr int topk_group = 0;
  static constexpr float routed_scaling_factor = 1.0F;
  static constexpr int num_zero_experts = 0;  ///< identity experts beyond num_experts
  static constexpr int block_hidden = 0;      ///< width of the block's rows, where the layer (`hidden`) works on a projection of them
  static constexpr int num_hash_layers = 0;   ///< the first layers, which choose by a table of token ids (HashTopK)
  static constexpr bool router_bias = false;
  static constexpr bool expert_bias = false;
  static constexpr bool weight_on_input = false;
  static constexpr float activation_alpha = 0.0F;  ///< constants of the activation (activation::Constants); 0: the activation's own
  static constexpr float activation_limit = 0.0F;  ///< its clamp
};

}  // namespace moe::models
