// SPDX-License-Identifier: Apache-2.0
// core/config_defaults.hpp: router, activation and shape that a layer takes from its configuration where the user sets none.
//
// A configuration may state more than its dimensions: a factor, groups, a limit. Each is a static constexpr member with the name of a
// member of Params, and is read here if both exist. So a preset of models/ is a whole layer. What a user sets in Params takes precedence.
#pragma once

#include "moe/core/layer_config.hpp"

namespace moe {

/// The activation with the constants that Config states: activation_alpha and activation_limit, situ_gate and situ_up; 0 means not stated.
/// Where the activation is chosen at run time, also with the kind that Config states: activation_kind.
template <class Config>
typename Config::Activation default_activation() {
  typename Config::Activation activation{};
  if constexpr (requires { activation.kind = Config::activation_kind; }) activation.kind = Config::activation_kind;
  auto const set = [](float& constant, float stated) {
    if (stated > 0.0F) constant = stated;
  };
  if constexpr (requires { activation.constants.alpha = Config::activation_alpha; }) {
    set(activation.constants.alpha, Config::activation_alpha);
  }
  if constexpr (requires { activation.constants.limit = Config::activation_limit; }) {
    set(activation.constants.limit, Config::activation_limit);
  }
  if constexpr (requires { activation.constants.situ_gate = Config::situ_gate; }) set(activation.constants.situ_gate, Config::situ_gate);
  if constexpr (requires { activation.constants.situ_up = Config::situ_up; }) set(activation.constants.situ_up, Config::situ_up);
  return activation;
}

/// A router's Params with the dimensions and constants that Config states. Pointers (a selection bias, a hash table) are the user's.
template <class Config, class Params>
Params default_router_params() {
  Params p{};
  if constexpr (requires { p.num_experts = Config::num_experts; }) {
    if (Config::num_experts != dynamic) p.num_experts = Config::num_experts;
  }
  if constexpr (requires { p.topk = Config::topk; }) {
    if (Config::topk != dynamic) p.topk = Config::topk;
  }
  if constexpr (requires { p.num_expert_group = Config::num_expert_group; }) p.num_expert_group = Config::num_expert_group;
  if constexpr (requires { p.topk_group = Config::topk_group; }) p.topk_group = Config::topk_group;
  if constexpr (requires { p.num_zero_experts = Config::num_zero_experts; }) p.num_zero_experts = Config::num_zero_experts;
  if constexpr (requires { p.routed_scaling_factor = Config::routed_scaling_factor; }) {
    p.routed_scaling_factor = Config::routed_scaling_factor;
  }
  if constexpr (requires { p.logit_softcap = Config::logit_softcap; }) p.logit_softcap = Config::logit_softcap;
  if constexpr (requires { p.router_jitter_noise = Config::router_jitter_noise; }) p.router_jitter_noise = Config::router_jitter_noise;
  if constexpr (requires { p.renorm = Config::renorm; }) p.renorm = Config::renorm;
  if constexpr (requires { p.renorm_eps = Config::renorm_eps; }) p.renorm_eps = Config::renorm_eps;
  return p;
}

/// A shape that takes every dimension from Config, and with weight_on_input as Config states it.
template <class Config>
LayerShape default_shape() {
  LayerShape shape{};
  if constexpr (requires { Config::weight_on_input; }) shape.weight_on_input = Config::weight_on_input;
  return shape;
}

}  // namespace moe
