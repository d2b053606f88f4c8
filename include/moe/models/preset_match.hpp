// SPDX-License-Identifier: Apache-2.0
// models/preset_match.hpp: whether a checkpoint is what a runner's type fixes: sizes, constants, router, parts. Every difference is an
// error that names the field and both values.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "moe/core/config_defaults.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/contract/params.hpp"
#include "moe/core/error.hpp"
#include "moe/io/layer_description.hpp"
#include "moe/io/one_line.hpp"
#include "moe/routing/row/router_config.hpp"
#include "moe/runner/declaration.hpp"

namespace moe::models {

namespace detail {

template <class Config>
std::string config_name() {
  if constexpr (requires { Config::kName; }) return Config::kName;
  return "the runner's configuration";
}

template <class T>
auto printable(T const& v) {
  if constexpr (std::is_enum_v<T>) {
    return static_cast<int>(v);
  } else {
    return v;
  }
}

/// E_CONFIG unless the file's value is the type's.
template <class T>
void expect_match(std::string_view label, std::string_view field, T const& file, T const& fixed, std::string const& by) {
  if (file == fixed) return;
  throw Error(ErrorCode::config,
              io::one_line("'", label, "': ", field, " is ", printable(file), ", and ", by, " fixes it to ", printable(fixed)));
}

/// Routers that compute the same have equal values here.
inline routing::RouterConfig canonical(routing::RouterConfig r) {
  using routing::Renorm;
  if (r.renorm == Renorm::p_norm && r.renorm_p == 1.0F) r.renorm = Renorm::sum;
  if (r.renorm != Renorm::p_norm) r.renorm_p = 1.0F;
  if (r.renorm == Renorm::none || r.renorm_eps <= 1e-12F) r.renorm_eps = 0.0F;  // below what a sum of scores can be
  if (r.num_expert_group <= 1) {
    r.num_expert_group = r.topk_group = 0;
    r.group_score = routing::GroupScore::max;
  }
  if (r.num_zero_experts == 0) r.zero_expert_kind = routing::ZeroExpertKind::none;
  if (r.selection != routing::Selection::sparsemixer) r.sparsemixer_eps = 0.0F;
  return r;
}

}  // namespace detail

/// Compares what Config states with a checkpoint's layer. `label` names the checkpoint.
template <class Config>
void match_config(io::LayerDescription const& d, std::string_view label) {
  std::string const by = detail::config_name<Config>();
  auto const size = [&](std::string_view field, std::int64_t file, std::int64_t fixed) {
    if (fixed != dynamic) detail::expect_match(label, field, file, fixed, by);
  };
  size("hidden", d.expert_hidden(), Config::hidden);
  size("intermediate", d.intermediate, Config::intermediate);
  size("num_experts", d.router.num_experts, Config::num_experts);
  size("topk", d.router.topk, Config::topk);
  using Activation = typename Config::Activation;
  if constexpr (requires { Config::activation_kind; }) {
    detail::expect_match(label, "activation", activation::name(d.activation.kind), activation::name(Config::activation_kind), by);
  } else if constexpr (facts::fixes_kind<Activation>()) {
    detail::expect_match(label, "activation", activation::name(d.activation.kind), activation::name(Activation::kKind), by);
  }
  auto const& c = d.activation.constants;
  auto const constant = [&](std::string_view field, float file, float stated) {
    if (stated > 0.0F) detail::expect_match(label, field, file, stated, by);
  };
  if constexpr (requires { Config::activation_alpha; }) constant("activation_alpha", c.alpha, Config::activation_alpha);
  if constexpr (requires { Config::activation_limit; }) constant("activation_limit", c.limit, Config::activation_limit);
  if constexpr (requires { Config::situ_gate; }) constant("situ_gate", c.situ_gate, Config::situ_gate);
  if constexpr (requires { Config::situ_up; }) constant("situ_up", c.situ_up, Config::situ_up);
  auto const flag = [&](std::string_view field, bool file, bool fixed) { detail::expect_match(label, field, file, fixed, by); };
  if constexpr (requires { Config::num_shared_experts; }) size("num_shared_experts", d.shared.count, Config::num_shared_experts);
  if constexpr (requires { Config::shared_intermediate; }) size("shared_intermediate", d.shared.intermediate, Config::shared_intermediate);
  if constexpr (requires { Config::shared_sigmoid_gate; }) {
    flag("shared_sigmoid_gate", d.shared.gate == io::SharedGate::sigmoid, Config::shared_sigmoid_gate);
  }
  if constexpr (requires { Config::block_hidden; }) size("block_hidden", d.latent > 0 ? d.hidden : 0, Config::block_hidden);
  if constexpr (requires { Config::router_bias; }) flag("router_bias", d.router_bias, Config::router_bias);
  if constexpr (requires { Config::expert_bias; }) flag("expert_bias", d.expert_bias, Config::expert_bias);
  if constexpr (requires { Config::weight_on_input; }) {
    flag("weight_on_input", d.weight_on == io::WeightOn::expert_input, Config::weight_on_input);
  }
  if constexpr (kExpertNorm<Config> != ExpertNorm::if_given) {
    flag("expert_norm", d.expert_norm, kExpertNorm<Config> == ExpertNorm::always);
  }
  auto const& r = d.router;
  auto const value = [&](std::string_view field, float file, float fixed) { detail::expect_match(label, field, file, fixed, by); };
  if constexpr (requires { Config::num_expert_group; }) size("num_expert_group", r.num_expert_group, Config::num_expert_group);
  if constexpr (requires { Config::topk_group; }) size("topk_group", r.topk_group, Config::topk_group);
  if constexpr (requires { Config::num_zero_experts; }) size("num_zero_experts", r.num_zero_experts, Config::num_zero_experts);
  if constexpr (requires { Config::routed_scaling_factor; }) {
    value("routed_scaling_factor", r.routed_scaling_factor * d.output_scaling_factor, Config::routed_scaling_factor);
  }
  if constexpr (requires { Config::logit_softcap; }) value("logit_softcap", r.logit_softcap, Config::logit_softcap);
}

/// E_CONFIG if the layer needs a part that the runner's type lacks.
template <class Parts>
void match_parts(io::LayerDescription const& d, std::string_view label) {
  using runner::detail::kPresent;
  auto const lacks = [&](std::string_view field, auto const& value, std::string_view part) {
    throw Error(ErrorCode::config, io::one_line("'", label, "': ", field, " is ", value, ", and the runner has no part ", part));
  };
  static_assert(Parts::Gate::kInside, "moe: load_runner() reads the gate. Fix: Gate = runner::gate::Linear<float> or Any in the parts");
  constexpr bool kAnyGate = requires(typename Parts::Gate::Params p) { p.mlp; };
  if (!kAnyGate && d.router_input != io::RouterInput::hidden) lacks("router_input", name(d.router_input), "Gate = runner::gate::Any");
  if (!kPresent<typename Parts::Shared> && d.shared.count > 0) lacks("num_shared_experts", d.shared.count, "Shared");
  if ((!kPresent<typename Parts::Input> || !kPresent<typename Parts::Output>) && d.latent > 0) lacks("latent", d.latent, "Input, Output");
  if (!kPresent<typename Parts::ZeroExperts> && d.router.num_zero_experts > 0) {
    lacks("num_zero_experts", d.router.num_zero_experts, "ZeroExperts");
  }
  if (std::is_same_v<typename Parts::Scaling, runner::scaling::None> && d.output_scaling_factor != 1.0F) {
    lacks("output_scaling_factor", d.output_scaling_factor, "Scaling");
  }
  if (std::is_same_v<typename Parts::End, runner::end::None> && (d.post_norm || d.output_bias)) {
    lacks(d.post_norm ? "post_norm" : "output_bias", "true", "End");
  }
}

/// The parameters of a router type for the file's router: what Config states, else the file's values. E_CONFIG, naming the choice, if the
/// type cannot make one that the file asks for.
template <class Config, class Router>
typename Router::Params matched_router(routing::RouterConfig const& file, std::string_view label) {
  using Params = typename Router::Params;
  if constexpr (std::is_same_v<Params, routing::RouterConfig>) {
    return file;
  } else {
    Params p = default_router_params<Config, Params>();
    p.num_experts = file.num_experts;
    p.topk = file.topk;
    if constexpr (requires { p.num_expert_group; } && !requires { Config::num_expert_group; }) p.num_expert_group = file.num_expert_group;
    if constexpr (requires { p.topk_group; } && !requires { Config::topk_group; }) p.topk_group = file.topk_group;
    if constexpr (requires { p.routed_scaling_factor; } && !requires { Config::routed_scaling_factor; })
      p.routed_scaling_factor = file.routed_scaling_factor;
    if constexpr (requires { p.logit_softcap; } && !requires { Config::logit_softcap; }) p.logit_softcap = file.logit_softcap;
    if constexpr (requires { p.num_zero_experts; } && !requires { Config::num_zero_experts; }) p.num_zero_experts = file.num_zero_experts;
    if constexpr (requires { p.num_joint_shared; } && !requires { Config::num_joint_shared; }) p.num_joint_shared = file.num_joint_shared;
    if constexpr (requires { p.renorm; } && !requires { Config::renorm; }) p.renorm = file.renorm;
    if constexpr (requires { p.renorm_eps; } && !requires { Config::renorm_eps; }) p.renorm_eps = file.renorm_eps;
    if constexpr (facts::takes_correction_bias<Params>()) p.correction_bias = file.correction_bias;
    if constexpr (requires { p.per_expert_scale; }) p.per_expert_scale = file.per_expert_scale;
    if constexpr (facts::takes_tables<Params>()) p.hash_table = file.hash_table;
    if constexpr (requires { p.vocabulary; }) p.vocabulary = file.vocabulary;
    if constexpr (requires { p.router_jitter_noise; } && !requires { Config::router_jitter_noise; })
      p.router_jitter_noise = file.sparsemixer_eps;
    routing::RouterConfig const a = detail::canonical(file), b = detail::canonical(Router(p).resolved());
    std::string const by = Router::kName;
    auto const same = [&](std::string_view field, auto const& x, auto const& y) { detail::expect_match(label, field, x, y, by); };
    same("the router's scoring", name(a.scoring), name(b.scoring));
    same("the router's order of scores and top-k", a.order, b.order);
    same("the router's selection", a.selection, b.selection);
    same("the router's renormalisation", a.renorm, b.renorm);
    same("the router's renormalisation eps", a.renorm_eps, b.renorm_eps);
    same("the router's renormalisation p", a.renorm_p, b.renorm_p);
    same("routed_scaling_factor", a.routed_scaling_factor, b.routed_scaling_factor);
    same("num_expert_group", a.num_expert_group, b.num_expert_group);
    same("topk_group", a.topk_group, b.topk_group);
    same("the router's score of a group", a.group_score, b.group_score);
    same("logit_softcap", a.logit_softcap, b.logit_softcap);
    same("the router's jitter", a.sparsemixer_eps, b.sparsemixer_eps);
    same("num_zero_experts", a.num_zero_experts, b.num_zero_experts);
    same("the kind of zero experts", a.zero_expert_kind, b.zero_expert_kind);
    same("num_joint_shared", a.num_joint_shared, b.num_joint_shared);
    same("the selection bias", a.correction_bias != nullptr, b.correction_bias != nullptr);
    same("the scale of each expert", a.per_expert_scale != nullptr, b.per_expert_scale != nullptr);
    same("the table of token ids", a.hash_table != nullptr, b.hash_table != nullptr);
    same("expert_capacity", a.expert_capacity, b.expert_capacity);
    return p;
  }
}

}  // namespace moe::models
