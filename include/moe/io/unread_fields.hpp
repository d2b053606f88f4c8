// SPDX-License-Identifier: Apache-2.0
// io/unread_fields.hpp: refuses a config.json with a field that affects another family's block and that its own family does not read.
//
// Each family reads the fields that its model's code reads. A configuration may also state a field that affects the block of another family
// only. Such a field must not be dropped silently: its value must agree with the description.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>

#include "moe/core/error.hpp"
#include "moe/io/hf_config.hpp"
#include "moe/io/layer_description.hpp"
#include "moe/io/one_line.hpp"

namespace moe::io::detail {

using Json = nlohmann::json;

/// Null, false, zero, or a list of these.
inline bool is_off(Json const& v) {
  if (v.is_array()) return std::ranges::all_of(v, is_off);
  return v.is_null() || v == false || (v.is_number() && v == 0);
}
inline bool is_number(Json const& v, float wanted) {
  return v.is_number() && std::abs(v.get<float>() - wanted) <= 1e-6F * std::abs(wanted);
}

/// A field that affects what a block computes, and whether its value agrees with `d`.
struct SemanticField {
  std::string_view name;
  bool (*agrees)(Json const& v, LayerDescription const& d);
};

inline bool agrees_off(Json const& v, LayerDescription const&) { return is_off(v); }
/// The clamped forms of silu are also named silu.
inline bool agrees_act(Json const& v, LayerDescription const& d) {
  using activation::Kind;
  switch (d.activation.kind) {
    case Kind::silu:
    case Kind::silu_clamped:
    case Kind::swiglu_step:
    case Kind::silu_no_mul: return v == "silu" || v == "swish";
    case Kind::swigluoai:
    case Kind::swigluoai_halves: return v == "silu" || v == "swigluoai";
    case Kind::gelu:
    case Kind::gelu_no_mul: return v == "gelu";
    case Kind::gelu_tanh:
    case Kind::gelu_tanh_no_mul: return v == "gelu_pytorch_tanh" || v == "gelu_new";
    case Kind::relu2_no_mul: return v == "relu2";
    case Kind::relu_no_mul: return v == "relu";
    case Kind::situ: return v == "situ";
  }
  return false;
}
inline bool agrees_gated(Json const& v, LayerDescription const& d) { return v == d.activation.gated(); }
inline bool agrees_norm(Json const& v, LayerDescription const& d) {
  bool const chosen_sum_to_one = d.router.order == routing::Order::topk_then_score && d.router.scoring == routing::Scoring::softmax;
  return v == (chosen_sum_to_one || d.router.renorm != routing::Renorm::none);
}
inline bool agrees_factor(Json const& v, LayerDescription const& d) {
  return is_number(v, d.router.routed_scaling_factor * d.output_scaling_factor);
}
inline bool agrees_groups(Json const& v, LayerDescription const& d) {
  int const groups = std::max(d.router.num_expert_group, 1);
  return v == groups || (groups == 1 && is_off(v));
}
inline bool agrees_scoring(Json const& v, LayerDescription const& d) { return v == routing::name(d.router.scoring); }
inline bool agrees_method(Json const& v, LayerDescription const& d) {
  return d.router.num_expert_group == 0 && v == (d.router.scoring == routing::Scoring::softmax ? "greedy" : "noaux_tc");
}
inline bool agrees_selection_bias(Json const& v, LayerDescription const& d) { return v == d.correction_bias; }
inline bool agrees_router_bias(Json const& v, LayerDescription const& d) { return v == d.router_bias; }
inline bool agrees_on_input(Json const& v, LayerDescription const& d) { return v == (d.weight_on == WeightOn::expert_input); }
inline bool agrees_softcap(Json const& v, LayerDescription const& d) { return is_number(v, d.router.logit_softcap); }
inline bool agrees_shared_count(Json const& v, LayerDescription const& d) { return v == d.shared.count; }
inline bool agrees_shared_width(Json const& v, LayerDescription const& d) { return v == d.shared.intermediate; }
inline bool agrees_shared_each(Json const& v, LayerDescription const& d) {
  if (d.shared.count == 0) return is_off(v);
  return v.is_number_integer() && v.get<std::int64_t>() * d.shared.count == d.shared.intermediate;
}
inline bool agrees_shared_sum(Json const& v, LayerDescription const& d) { return d.shared.count == 0 || v == name(d.shared.combination); }
inline bool agrees_shared_sink(Json const& v, LayerDescription const& d) { return v == (d.router.num_joint_shared > 0); }
inline bool agrees_zero_count(Json const& v, LayerDescription const& d) { return v == d.router.num_zero_experts; }
inline bool agrees_zero_type(Json const& v, LayerDescription const& d) { return d.router.num_zero_experts == 0 || v == "identity"; }
inline bool agrees_latent(Json const& v, LayerDescription const& d) { return v == d.expert_hidden() || (d.latent == 0 && is_off(v)); }
inline bool agrees_latent_norm(Json const& v, LayerDescription const& d) { return v == d.latent_norm; }
inline bool agrees_logit_scale(Json const& v, LayerDescription const& d) { return is_number(v, d.router_logit_scale); }
inline bool agrees_float32(Json const& v, LayerDescription const&) { return v == "float32" || v == "fp32"; }

inline constexpr SemanticField kSemanticFields[] = {
    {"hidden_act", agrees_act},
    {"hidden_activation", agrees_act},
    {"activation_function", agrees_act},
    {"mlp_hidden_act", agrees_act},
    {"dense_act_fn", agrees_act},
    {"is_gated_act", agrees_gated},
    {"swiglu_alpha", agrees_off},
    {"swiglu_beta", agrees_off},
    {"swiglu_limit", agrees_off},
    {"swiglu_limits", agrees_off},
    {"swiglu_limits_shared", agrees_off},
    {"mlp_gate_softcap", agrees_off},
    {"mlp_up_softcap", agrees_off},
    {"norm_topk_prob", agrees_norm},
    {"moe_renormalize", agrees_norm},
    {"norm_expert_weight", agrees_norm},
    {"route_norm", agrees_norm},
    {"routed_scaling_factor", agrees_factor},
    {"route_scale", agrees_factor},
    {"router_scaling_factor", agrees_factor},
    {"moe_routed_scaling_factor", agrees_factor},
    {"moe_router_scaling_factor", agrees_factor},
    {"n_group", agrees_groups},
    {"num_expert_group", agrees_groups},
    {"scoring_func", agrees_scoring},
    {"score_func", agrees_scoring},
    {"moe_router_activation", agrees_scoring},
    {"moe_router_activation_func", agrees_scoring},
    {"expert_selection_fn", agrees_scoring},
    {"topk_method", agrees_method},
    {"use_expert_bias", agrees_selection_bias},
    {"use_routing_bias", agrees_selection_bias},
    {"use_moe_router_bias", agrees_selection_bias},
    {"moe_router_enable_expert_bias", agrees_selection_bias},
    {"router_bias", agrees_router_bias},
    {"router_dtype", agrees_float32},
    {"moe_router_dtype", agrees_float32},
    {"moe_apply_router_weight_on_input", agrees_on_input},
    {"router_logit_softcapping", agrees_softcap},
    {"moe_router_logit_softcapping", agrees_softcap},
    {"n_shared_experts", agrees_shared_count},
    {"num_shared_experts", agrees_shared_count},
    {"num_shared_expert", agrees_shared_count},
    {"moe_num_shared_experts", agrees_shared_count},
    {"shared_expert_intermediate_size", agrees_shared_width},
    {"shared_intermediate_size", agrees_shared_width},
    {"moe_shared_expert_intermediate_size", agrees_shared_width},
    {"share_expert_dim", agrees_shared_width},
    {"shared_expert_combination_strategy", agrees_shared_sum},
    {"shared_expert_sink", agrees_shared_sink},
    {"zero_expert_num", agrees_zero_count},
    {"zero_expert_type", agrees_zero_type},
    {"moe_latent_size", agrees_latent},
    {"routed_expert_hidden_size", agrees_latent},
    {"latent_moe_use_norm", agrees_latent_norm},
    {"moe_hidden_size", agrees_latent},
    {"output_multiplier", agrees_logit_scale},
    {"shared_experts_intermediate_size", agrees_shared_each},
};

/// E_UNSUPPORTED naming a field of kSemanticFields that `c` states, that is not in `read` and that disagrees with `d`.
inline void refuse_unread(HfConfig const& c, std::set<std::string, std::less<>> const& read, LayerDescription const& d) {
  for (SemanticField const& field : kSemanticFields) {
    auto const at = c.json().find(field.name);
    if (at == c.json().end() || at->is_null() || read.contains(field.name) || field.agrees(*at, d)) continue;
    throw Error(ErrorCode::unsupported, one_line("'", c.label(), "': '", field.name, "' is ", HfConfig::spelled(*at),
                                                 ", which the blocks of ", d.model_type, " do not have: what they compute is not known"));
  }
}
/// E_UNSUPPORTED if per_layer_config gives layer `layer` another value of a field that its block uses. Only the families that read
/// per_layer_config have such blocks; others read it for their attention alone.
inline void refuse_own_values(HfConfig const& c, std::set<std::string, std::less<>> const& read, std::int64_t layer) {
  if (read.contains("per_layer_config")) return;
  auto const own = c.of_layer(layer);
  if (!own) return;
  for (auto const& [field, value] : own->json().items()) {
    bool const of_the_block = read.contains(field) || field == "num_experts_per_tok" || field == "moe_intermediate_size" ||
                              std::ranges::find(kSemanticFields, field, &SemanticField::name) != std::end(kSemanticFields);
    auto const at = c.json().find(field);
    bool const skips = field == "skip" && !value.empty();
    if (!skips && (!of_the_block || (at != c.json().end() && *at == value))) continue;
    throw Error(ErrorCode::unsupported, one_line("'", own->label(), "': '", field.substr(0, 60), "' is ", HfConfig::spelled(value),
                                                 " for this layer alone, which the blocks of ", c.model_type(), " do not have"));
  }
}

}  // namespace moe::io::detail
