// SPDX-License-Identifier: Apache-2.0
// io/families_biased.hpp: DeepSeek-V2 and -V3, and the families that choose by sigmoid scores and a selection bias.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <utility>

#include "moe/io/family_fields.hpp"
#include "moe/io/one_line.hpp"

namespace moe::io::detail::families {

// DeepSeek-V2, -V3 and relatives

/// The language models of DeepSeek-OCR-2 and Unlimited-OCR, and all of DeepSeek-V2 but a field.
inline void deepseek_ocr(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  if (c.has("scoring_func")) c.string("scoring_func", {"softmax"});
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
  c.ignore("n_group");  // the greedy choice has no groups
  if (c.string("topk_method", {"greedy", "group_limited_greedy"}) == "group_limited_greedy") {
    groups(c, d, "n_group", "topk_group", GroupScore::max);
  }
  shared_of_routed_width(c, d, {"n_shared_experts"});
}
inline void deepseek_v2(Config c, Out d) {
  deepseek_ocr(c, d);
  // The field must be there, but transformers' model ignores it: the weights are never renormalised.
  (void)c.flag("norm_topk_prob");
}
/// Sigmoid scores, and a bias that is used for selection only.
inline void biased_sigmoid(Out d) {
  d.router.scoring = Scoring::sigmoid;
  d.correction_bias = true;
}
/// The router of DeepSeek-V3, by the names of its fields.
inline void grouped_sigmoid(Config c, Out d) {
  biased_sigmoid(d);
  groups(c, d, "n_group", "topk_group", GroupScore::top2_sum);
  renormalise(d, c.flag("norm_topk_prob"), 1e-20F);
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
}
inline void deepseek_v3(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  biased_sigmoid(d);
  if (c.has("scoring_func")) c.string("scoring_func", {"sigmoid"});
  if (c.has("topk_method")) c.string("topk_method", {"noaux_tc"});
  if (d.model_type != "axk2" || c.has("n_group")) groups(c, d, "n_group", "topk_group", GroupScore::top2_sum);
  renormalise(d, c.flag("norm_topk_prob"), 1e-20F);
  bool const mimo = d.model_type.starts_with("mimo");
  d.router.routed_scaling_factor = c.has("routed_scaling_factor") || !mimo ? c.positive("routed_scaling_factor") : 1.0F;
  shared_of_routed_width(c, d, {"n_shared_experts", "num_shared_experts"}, mimo || d.model_type == "dots1");
}
inline void axk1(Config c, Out d) {
  deepseek_v3(c, d);
  d.post_norm = true;
  d.rms_norm_eps = c.positive("rms_norm_eps");
}
inline void nemotron_h(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"}, "");
  d.activation.kind = ungated_kind(c.string("mlp_hidden_act"), c.label());
  grouped_sigmoid(c, d);
  shared(d, c.integer("n_shared_experts", 1, 1024), c.integer("moe_shared_expert_intermediate_size"));
  if (c.has("moe_latent_size")) d.latent = c.integer("moe_latent_size");
}
inline void bailing_hybrid(Config c, Out d) {
  shapes(c, d, {"num_experts_per_token", "num_experts_per_tok"}, {"moe_intermediate_size"});
  biased_sigmoid(d);
  groups(c, d, first_stated(c, {"num_expert_group", "n_group"}), "topk_group", GroupScore::top2_sum);
  renormalise(d, c.flag(first_stated(c, {"moe_renormalize", "norm_topk_prob"})), 1e-20F);
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
  shared_of_routed_width(c, d, {"num_shared_experts", "n_shared_experts"});
}
/// The scaling factor is applied to the sum, not to the weights.
inline void beam(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  grouped_sigmoid(c, d);
  std::swap(d.output_scaling_factor, d.router.routed_scaling_factor);
}
inline void dots3_note(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  grouped_sigmoid(c, d);
  std::int64_t const n = c.integer("n_shared_experts", 0, 1024);
  if (n > 0) shared(d, n, n * c.integer({"shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"}));
}
/// The image encoder of dots3-note: per_layer_config overrides the counts of single layers.
inline void dots3_note_vision(Config c, Out d, std::int64_t layer) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  biased_sigmoid(d);
  renormalise(d, true, 1e-20F);
  d.router.routed_scaling_factor = c.positive("router_scaling_factor");
  auto const own = c.of_layer(layer);
  if (!own) return;
  for (auto const& [field, value] : own->json().items()) {
    if (field == "num_local_experts") {
      d.router.num_experts = static_cast<int>(own->integer(field, 1, 65536));
    } else if (field == "num_experts_per_tok") {
      d.router.topk = static_cast<int>(own->integer(field, 1, kMaxTopK));
    } else {
      throw Error(ErrorCode::unsupported, one_line("'", own->label(), "': '", field.substr(0, 60), "' is not known for a single layer"));
    }
  }
}
/// The shared experts are clamped like the routed ones.
inline void glm5_next(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"}, "");
  c.string("hidden_act", {"silu"});
  grouped_sigmoid(c, d);
  clamped_silu(c, d);
  shared_of_routed_width(c, d, {"n_shared_experts"});
}
/// hidden_act is the activation of the shared experts, which are not clamped.
inline void hy_v4(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  grouped_sigmoid(c, d);
  shared_of_routed_width(c, d, {"n_shared_experts"});
  clamped_silu(c, d);
}
inline void inkling2(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size", "intermediate_size"}, "");
  if (c.has("hidden_act")) c.string("hidden_act", {"silu"});
  d.activation.kind = Kind::situ;
  d.activation.constants.situ_gate = c.positive("mlp_gate_softcap");
  d.activation.constants.situ_up = c.positive("mlp_up_softcap");
  biased_sigmoid(d);
  if (c.has("scoring_func")) c.string("scoring_func", {"sigmoid"});
  renormalise(d, true, 1e-20F);
  d.router.routed_scaling_factor = c.positive(first_stated(c, {"route_scale", "routed_scaling_factor"}));
}
inline void muse_spark(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  biased_sigmoid(d);
  d.router_logit_scale = c.positive("output_multiplier");
  renormalise(d, true, 1e-15F);
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
  d.latent = c.integer("moe_hidden_size");
  d.latent_in_norm = true;
  d.rms_norm_eps = c.positive("rms_norm_eps");
  d.expert_norm = true;
  d.expert_norm_eps = c.positive("post_norm_eps");
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
  c.ignore("latent_moe_use_norm");  // where the experts work on the token itself
  bool const grouped = c.has("num_expert_group") && c.integer("num_expert_group", 0) > 1;
  if (grouped && c.has("use_grouped_topk") && !c.flag("use_grouped_topk")) {
    throw Error(ErrorCode::unsupported, one_line("'", c.label(), "': use_grouped_topk is false and num_expert_group is ",
                                                 c.integer("num_expert_group"), ", and models of kimi_linear differ in which they obey"));
  }
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
  if (c.has("hidden_act")) c.string("hidden_act", {"silu", "swigluoai"});  // transformers writes silu and computes swigluoai
  swigluoai(d, c.positive("swiglu_alpha"), c.positive("swiglu_limit"));
  shared(d, 1, c.integer("shared_intermediate_size"));
}
inline ActivationChoice step_activation(Config c, std::string_view field, std::int64_t layer) {
  ActivationChoice out;
  if (!c.has(field) || c.json()[field].empty()) return out;
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
  if (c.has("hidden_act")) c.string("hidden_act", {"silu"});
  shared(d, 1, c.integer({"share_expert_dim", "share_expert_dims"}));
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
  if (c.has("num_shared_experts")) (void)c.integer("num_shared_experts", 1, 1024);  // 0 would mean one as wide as a dense layer
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
  if (c.has("hidden_act")) c.string("hidden_act", {"silu"});
  d.correction_bias = c.flag("use_expert_bias");
  renormalise(d, c.flag("norm_topk_prob"), 1e-6F);
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
}

}  // namespace moe::io::detail::families
