// SPDX-License-Identifier: Apache-2.0
// io/families.hpp: the model families: from a config.json and a layer index to what that layer's MoE block computes.
//
// One function a family, in the words of the family's own configuration. What a family's code fixes is a constant here; what its
// configuration decides is read from it, and a field that is missing is an error.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "moe/core/error.hpp"
#include "moe/io/hf_config.hpp"
#include "moe/io/layer_description.hpp"
#include "moe/io/one_line.hpp"

namespace moe::io {

namespace detail::families {

using activation::Kind;
using routing::GroupScore;
using routing::Order;
using routing::Renorm;
using routing::Scoring;
using routing::Selection;
using Fields = std::initializer_list<std::string_view>;
using Config = HfConfig const&;
using Out = LayerDescription&;

/// The three shapes every family has, and the gated activation that the configuration names.
inline void shapes(Config c, Out d, Fields topk, Fields intermediate, std::string_view act = "hidden_act") {
  d.hidden = c.integer("hidden_size");
  d.intermediate = c.integer(intermediate);
  d.router.num_experts = static_cast<int>(c.integer({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}, 1, 65536));
  d.router.topk = static_cast<int>(c.integer(topk, 1, kMaxTopK));
  d.activation.kind = act.empty() ? Kind::silu : gated_kind(c.string(act), c.label());
}
inline void renormalise(Out d, bool yes, float eps = 0.0F) {
  d.router.renorm = yes ? Renorm::sum : Renorm::none;
  d.router.renorm_eps = eps;
}
inline void shared(Out d, std::int64_t count, std::int64_t intermediate, SharedGate gate = SharedGate::none) {
  if (count == 0) return;
  d.shared.count = static_cast<int>(count);
  d.shared.intermediate = intermediate;
  d.shared.gate = gate;
  d.shared.activation = d.activation;
}
/// `n` shared experts as wide as a routed one; absent or null means none.
inline void shared_of_routed_width(Config c, Out d, Fields fields) {
  for (std::string_view f : fields) {
    if (!c.has(f)) continue;
    std::int64_t const n = c.integer(f, 0, 1024);
    return shared(d, n, n * d.intermediate);
  }
}
inline void groups(Config c, Out d, std::string_view group_field, std::string_view kept_field, GroupScore score) {
  d.router.num_expert_group = static_cast<int>(c.integer(group_field, 1, 65536));
  d.router.topk_group = static_cast<int>(c.integer(kept_field, 1, 65536));
  d.router.group_score = score;
  if (d.router.num_expert_group == 1) d.router.num_expert_group = d.router.topk_group = 0;
}

// softmax over all experts, then top-k

inline void mixtral(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"});
  renormalise(d, true);
}
inline void qwen_moe(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  renormalise(d, c.flag("norm_topk_prob"));
}
inline void qwen_moe_always(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  renormalise(d, true);
}
inline void qwen_shared(Config c, Out d) {
  qwen_moe(c, d);
  shared(d, 1, c.integer("shared_expert_intermediate_size"), SharedGate::sigmoid);
}
inline void qwen_shared_always(Config c, Out d) {
  qwen_moe_always(c, d);
  shared(d, 1, c.integer("shared_expert_intermediate_size"), SharedGate::sigmoid);
}
inline void olmoe(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"});
  renormalise(d, c.flag("norm_topk_prob"));
}
inline void jamba(Config c, Out d) { shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"}); }
/// Values that Hunyuan states once for all layers or once a layer.
inline void hunyuan_v1(Config c, Out d, std::int64_t layer) {
  d.hidden = c.integer("hidden_size");
  d.intermediate = c.has("moe_intermediate_size") ? c.integer_at("moe_intermediate_size", layer) : c.integer("intermediate_size");
  d.router.num_experts = static_cast<int>(c.integer_at("num_experts", layer, 1, 65536));
  d.router.topk = static_cast<int>(c.integer_at("moe_topk", layer, 1, kMaxTopK));
  d.activation.kind = gated_kind(c.string("hidden_act"), c.label());
  renormalise(d, true);
  std::int64_t const n = c.has("num_shared_expert") ? c.integer_at("num_shared_expert", layer, 0, 64) : 1;
  shared(d, n, n * c.integer("intermediate_size"));
}
inline void dbrx(Config c, Out d) {
  HfConfig const f = c.section("ffn_config");
  d.hidden = c.integer("d_model");
  d.intermediate = f.integer("ffn_hidden_size");
  d.router.num_experts = static_cast<int>(f.integer("moe_num_experts", 1, 65536));
  d.router.topk = static_cast<int>(f.integer("moe_top_k", 1, kMaxTopK));
  if (f.has("ffn_act_fn")) d.activation.kind = gated_kind(f.section("ffn_act_fn").string("name"), f.label());
  // The released checkpoint leaves the field out and means the 1.0 of the family's code; null switches the normalisation off.
  d.layout = WeightLayout::stacked;
  d.router.renorm_eps = 0.0F;
  if (!f.json().contains("moe_normalize_expert_weights")) d.router.renorm = Renorm::p_norm;
  if (f.has("moe_normalize_expert_weights")) {
    d.router.renorm = Renorm::p_norm;
    d.router.renorm_p = static_cast<float>(f.number("moe_normalize_expert_weights", 1e-3, 1e3));
  }
}
inline void grok1(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"}, "");
  d.activation.kind = Kind::gelu;
  d.router.logit_softcap = c.has("router_logit_softcapping") ? c.positive("router_logit_softcapping") : 30.0F;
}
inline void switch_transformers(Config c, Out d) {
  d.hidden = c.integer("d_model");
  d.intermediate = c.integer("d_ff");
  d.router.num_experts = static_cast<int>(c.integer("num_experts", 1, 65536));
  d.router.topk = 1;
  d.activation.kind = ungated_kind(c.string("dense_act_fn"), c.label());
  d.router_bias = c.flag("router_bias");
}

// top-k of the logits, then a score of the chosen

inline void topk_softmax(Out d) { d.router.order = Order::topk_then_score; }
inline void granite(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"});
  topk_softmax(d);
  // In the -shared and -hybrid models the shared MLP stands beside the block and sees the same input.
  if (c.has("shared_intermediate_size") && c.integer("shared_intermediate_size", 0) > 0)
    shared(d, 1, c.integer("shared_intermediate_size"));
}
inline void jetmoe(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"}, "activation_function");
  topk_softmax(d);
  d.output_bias = true;
}
inline void swigluoai(Out d, float alpha, float limit) {
  d.activation.kind = Kind::swigluoai_halves;
  d.activation.constants.alpha = alpha;
  d.activation.constants.beta = 1.0F;
  d.activation.constants.limit = limit;
}
inline void gpt_oss(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"}, "");
  topk_softmax(d);
  swigluoai(d, 1.702F, c.has("swiglu_limit") ? c.positive("swiglu_limit") : 7.0F);
  d.router_bias = d.expert_bias = true;
  d.layout = WeightLayout::fused_transposed_interleaved;
}
inline void openai_privacy_filter(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"}, "");
  topk_softmax(d);
  swigluoai(d, 1.702F, 7.0F);
  d.router_bias = d.expert_bias = true;
  d.router.routed_scaling_factor = 1.0F / static_cast<float>(d.router.topk);
  d.output_scaling_factor = static_cast<float>(d.router.topk);
  d.layout = WeightLayout::fused_transposed;
}
inline void aria(Config c, Out d) {
  shapes(c, d, {"moe_topk"}, {"intermediate_size"});
  topk_softmax(d);
  shared_of_routed_width(c, d, {"moe_num_shared_experts"});
  d.layout = WeightLayout::fused_transposed;
}
inline void cohere2(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"});
  topk_softmax(d);
  if (c.string("expert_selection_fn", {"softmax", "sigmoid"}) == "sigmoid") {
    d.router.scoring = Scoring::sigmoid;
    renormalise(d, c.flag("norm_topk_prob"));
  }
  shared_of_routed_width(c, d, {"num_shared_experts"});
  if (d.shared.count > 0 && c.string("shared_expert_combination_strategy", {"sum", "average"}) == "average") {
    d.shared.combination = Combination::average;
  }
}
inline void llama4(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"});
  topk_softmax(d);
  d.router.scoring = Scoring::sigmoid;
  d.weight_on = WeightOn::expert_input;
  shared(d, 1, d.intermediate);
  d.layout = WeightLayout::fused_transposed;
}

// DeepSeek-V2, -V3 and relatives

inline void deepseek_v2(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  if (c.has("scoring_func")) c.string("scoring_func", {"softmax"});
  // The field must be there, but transformers' model does not act on it: the weights are never renormalised.
  (void)c.flag("norm_topk_prob");
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
  if (c.string("topk_method", {"greedy", "group_limited_greedy"}) == "group_limited_greedy") {
    groups(c, d, "n_group", "topk_group", GroupScore::max);
  }
  shared_of_routed_width(c, d, {"n_shared_experts"});
}
/// Sigmoid scores, a bias that takes part in choosing only.
inline void biased_sigmoid(Out d) {
  d.router.scoring = Scoring::sigmoid;
  d.correction_bias = true;
}
inline void deepseek_v3(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  biased_sigmoid(d);
  if (c.has("scoring_func")) c.string("scoring_func", {"sigmoid"});
  if (c.has("topk_method")) c.string("topk_method", {"noaux_tc"});
  groups(c, d, "n_group", "topk_group", GroupScore::top2_sum);
  renormalise(d, c.flag("norm_topk_prob"), 1e-20F);
  d.router.routed_scaling_factor =
      c.has("routed_scaling_factor") || !d.model_type.starts_with("mimo") ? c.positive("routed_scaling_factor") : 1.0F;
  shared_of_routed_width(c, d, {"n_shared_experts", "num_shared_experts"});
}
inline void axk1(Config c, Out d) {
  deepseek_v3(c, d);
  d.post_norm = true;
  d.rms_norm_eps = c.positive("rms_norm_eps");
}
inline void nemotron_h(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"}, "");
  d.activation.kind = ungated_kind(c.string("mlp_hidden_act"), c.label());
  biased_sigmoid(d);
  groups(c, d, "n_group", "topk_group", GroupScore::top2_sum);
  renormalise(d, c.flag("norm_topk_prob"), 1e-20F);
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
  shared(d, c.integer("n_shared_experts", 0, 1024), c.integer("moe_shared_expert_intermediate_size", 0));
  if (c.has("moe_latent_size")) d.latent = c.integer("moe_latent_size");
}
/// Kimi-Linear, and Kimi-K3 under the same model type: its routed experts work on a projection of the token.
inline void kimi_linear(Config c, Out d) {
  bool const situ = c.has("hidden_act") && c.string("hidden_act") == "situ";
  shapes(c, d, {"num_experts_per_token", "num_experts_per_tok"}, {"moe_intermediate_size"}, situ ? "" : "hidden_act");
  if (situ) {
    d.activation.kind = Kind::situ;
    d.activation.constants.situ_gate = c.positive("activation_situ_beta");
    d.activation.constants.situ_up = c.positive("activation_situ_linear_beta");
  }
  biased_sigmoid(d);
  if (c.has("moe_router_activation_func")) c.string("moe_router_activation_func", {"sigmoid"});
  if (c.has("routed_expert_hidden_size") && c.integer("routed_expert_hidden_size") != d.hidden) {
    d.latent = c.integer("routed_expert_hidden_size");
    d.latent_norm = c.flag("latent_moe_use_norm");
    if (d.latent_norm) d.rms_norm_eps = c.positive("rms_norm_eps");
  }
  bool const grouped = c.has("use_grouped_topk") ? c.flag("use_grouped_topk") : c.has("num_expert_group");
  if (grouped) groups(c, d, "num_expert_group", "topk_group", GroupScore::top2_sum);
  renormalise(d, c.flag("moe_renormalize"), 1e-20F);
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
  shared_of_routed_width(c, d, {"num_shared_experts"});
}
inline void minimax_m2(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"});
  if (c.has("scoring_func")) c.string("scoring_func", {"sigmoid"});
  biased_sigmoid(d);
  renormalise(d, true);
}
inline void minimax_m3(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"}, "");
  biased_sigmoid(d);
  renormalise(d, true);
  d.output_scaling_factor = c.positive("routed_scaling_factor");
  swigluoai(d, c.positive("swiglu_alpha"), c.positive("swiglu_limit"));
  shared(d, 1, c.integer("shared_intermediate_size"));
}
inline ActivationChoice step_activation(Config c, std::string_view field, std::int64_t layer) {
  ActivationChoice out;
  if (!c.has(field)) return out;
  nlohmann::json const& limit = c.at(field, layer);
  if (limit.is_null()) return out;
  if (!limit.is_number() || !(limit.get<double>() >= 0.0)) c.fail(one_line("'", field, "'[", layer, "] must be a number >= 0"));
  if (limit.get<double>() > 0.0) {
    out.kind = Kind::swiglu_step;
    out.constants.limit = limit.get<float>();
  }
  return out;
}
inline void step3(Config c, Out d, std::int64_t layer) {
  shapes(c, d, {"num_experts_per_tok", "moe_top_k"}, {"moe_intermediate_size"}, "");
  biased_sigmoid(d);
  renormalise(d, true);
  d.output_scaling_factor = c.positive("moe_router_scaling_factor");
  shared(d, 1, c.integer("share_expert_dim"));
  d.activation = step_activation(c, "swiglu_limits", layer);
  d.shared.activation = step_activation(c, "swiglu_limits_shared", layer);
}
inline void laguna(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  biased_sigmoid(d);
  renormalise(d, true);
  d.output_scaling_factor = c.positive("moe_routed_scaling_factor");
  d.router.logit_softcap = static_cast<float>(c.number("moe_router_logit_softcapping", 0.0, 1e6));
  if (c.flag("moe_apply_router_weight_on_input")) d.weight_on = WeightOn::expert_input;
  shared(d, 1, c.integer("shared_expert_intermediate_size"));
}
inline void hy_v3(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  biased_sigmoid(d);
  renormalise(d, true, 1e-20F);
  d.router.routed_scaling_factor = c.positive("router_scaling_factor");
  shared_of_routed_width(c, d, {"num_shared_experts"});
}
inline void afmoe(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  biased_sigmoid(d);
  renormalise(d, true, 1e-20F);
  d.router.routed_scaling_factor = c.positive("route_scale");
  shared_of_routed_width(c, d, {"num_shared_experts"});
}
inline void lfm2(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"}, "");
  d.router.scoring = Scoring::sigmoid;
  d.correction_bias = c.flag("use_expert_bias");
  renormalise(d, c.flag("norm_topk_prob"), 1e-6F);
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
}

// further rules

inline void deepseek_v4(Config c, Out d, std::int64_t layer) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"}, "");
  if (c.has("hidden_act")) c.string("hidden_act", {"silu"});
  c.string("scoring_func", {"sqrtsoftplus"});
  d.router.scoring = Scoring::sqrtsoftplus;
  renormalise(d, c.flag("norm_topk_prob"), 1e-20F);
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
  bool const hash = c.has("mlp_layer_types") ? c.at("mlp_layer_types", layer) == "hash_moe" : layer < c.integer("num_hash_layers", 0);
  if (hash) d.router.selection = Selection::hash_table;
  d.correction_bias = !hash;
  d.activation.kind = Kind::silu_clamped;
  d.activation.constants.limit = c.positive("swiglu_limit");
  shared_of_routed_width(c, d, {"n_shared_experts"});
}
inline void ernie(Config c, Out d) {
  shapes(c, d, {"moe_k"}, {"moe_intermediate_size"});
  d.correction_bias = true;
  d.router.renorm = Renorm::floor;
  d.router.renorm_eps = c.has("moe_norm_min") ? static_cast<float>(c.number("moe_norm_min", 0.0, 1.0)) : 1e-12F;
  shared_of_routed_width(c, d, {"moe_num_shared_experts"});
}
inline void longcat_flash(Config c, Out d) {
  shapes(c, d, {"moe_topk"}, {"expert_ffn_hidden_size"}, c.has("hidden_act") ? "hidden_act" : "");
  d.correction_bias = true;
  d.router.num_zero_experts = static_cast<int>(c.integer("zero_expert_num", 0, 65536));
  if (c.has("zero_expert_type")) c.string("zero_expert_type", {"identity"});
  if (c.has("norm_topk_prob")) renormalise(d, c.flag("norm_topk_prob"), 1e-20F);
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
}
inline void mistral4(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  groups(c, d, "n_group", "topk_group", GroupScore::top2_sum);
  renormalise(d, c.flag("norm_topk_prob"), 1e-20F);
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
  shared_of_routed_width(c, d, {"n_shared_experts"});
}
inline void phimoe(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"});
  d.router.selection = Selection::sparsemixer;
  d.router.sparsemixer_eps = static_cast<float>(c.number("router_jitter_noise", 0.0, 1.0));
}
inline void gemma4(Config c, Out d) {
  shapes(c, d, {"top_k_experts", "num_experts_per_tok"}, {"moe_intermediate_size"}, "hidden_activation");
  renormalise(d, true);
  d.per_expert_scale = true;
  d.router_input = RouterInput::scaled_rms_norm;
  d.rms_norm_eps = c.positive("rms_norm_eps");
}
inline void inkling(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  biased_sigmoid(d);
  renormalise(d, true);
  d.router.routed_scaling_factor = c.positive("route_scale");
  if (!c.flag("shared_expert_sink")) c.fail("'shared_expert_sink' is false, which is not known");
  std::int64_t const n = c.integer("n_shared_experts", 1, 64);
  shared(d, n, n * d.intermediate, SharedGate::routing_weight);
  d.router.num_joint_shared = static_cast<int>(n);
}
inline void zaya(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  d.correction_bias = true;
  d.router_input = RouterInput::mlp;
  d.rms_norm_eps = c.positive("rms_norm_eps");
  d.router.num_zero_experts = 1;
  d.router.zero_expert_kind = routing::ZeroExpertKind::none;
}

}  // namespace detail::families

}  // namespace moe::io
