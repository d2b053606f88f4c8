// SPDX-License-Identifier: Apache-2.0
// io/families_softmax.hpp: the families whose weights are a softmax (or a related function) without a selection bias.
#pragma once

#include <string>

#include "moe/io/family_fields.hpp"
#include "moe/io/one_line.hpp"

namespace moe::io::detail::families {

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
/// Values that Hunyuan states once for all layers or once per layer.
inline void hunyuan_v1(Config c, Out d, std::int64_t layer) {
  d.hidden = c.integer("hidden_size");
  d.intermediate = c.has("moe_intermediate_size") ? c.integer_at("moe_intermediate_size", layer) : c.integer("intermediate_size");
  d.router.num_experts = static_cast<int>(c.integer_at("num_experts", layer, 1, 65536));
  std::int64_t const topk = c.integer_at(first_stated(c, {"moe_topk", "num_experts_per_tok"}), layer, 1, kMaxTopK);
  std::int64_t const other = c.has("num_experts_per_tok") ? c.integer_at("num_experts_per_tok", layer, 1, kMaxTopK) : topk;
  if (other != topk) {
    c.fail(one_line("'moe_topk' is ", topk, " in layer ", layer, " and 'num_experts_per_tok' is ", other, ", but they mean the same"));
  }
  d.router.topk = static_cast<int>(topk);
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
  if (c.has("hidden_act")) c.string("hidden_act", {"gelu"});
  d.activation.kind = Kind::gelu;
  d.router.logit_softcap = positive_or(c, "router_logit_softcapping", 30.0F);
}
inline void switch_transformers(Config c, Out d) {
  d.hidden = c.integer("d_model");
  d.intermediate = c.integer("d_ff");
  d.router.num_experts = static_cast<int>(c.integer("num_experts", 1, 65536));
  d.router.topk = 1;
  d.activation.kind = ungated_kind(c.string("dense_act_fn"), c.label());
  d.router_bias = c.flag("router_bias");
  if (c.has("router_dtype")) c.string("router_dtype", {"float32"});
  d.router.expert_capacity = c.integer("expert_capacity");
}

// top-k of the logits, then a score of the chosen

inline void topk_softmax(Out d) { d.router.order = Order::topk_then_score; }
inline void granite(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"});
  topk_softmax(d);
  // In the -shared and -hybrid models the shared MLP stands beside the block and sees the same input.
  bool const always = d.model_type == "granitemoehybrid";  // the field is required: its default in the model's code is not 0
  std::int64_t const width = always || c.has("shared_intermediate_size") ? c.integer("shared_intermediate_size", 0) : 0;
  if (width > 0) shared(d, 1, width);
}
inline void jetmoe(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"}, "activation_function");
  topk_softmax(d);
  d.output_bias = true;
}
inline void gpt_oss(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok", "experts_per_token"}, {"intermediate_size"}, "");
  topk_softmax(d);
  swigluoai(d, positive_or(c, "swiglu_alpha", 1.702F), positive_or(c, "swiglu_limit", 7.0F));
  d.router_bias = d.expert_bias = true;
  d.layout = WeightLayout::fused_transposed_interleaved;
}
inline void openai_privacy_filter(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"}, "");
  topk_softmax(d);
  swigluoai(d, positive_or(c, "swiglu_alpha", 1.702F), positive_or(c, "swiglu_limit", 7.0F));
  d.router_bias = d.expert_bias = true;
  d.router.routed_scaling_factor = 1.0F / static_cast<float>(d.router.topk);
  d.output_scaling_factor = static_cast<float>(d.router.topk);
  d.layout = WeightLayout::fused_transposed;
}
inline void aria(Config c, Out d) {
  shapes(c, d, {"moe_topk"}, {"intermediate_size"}, "");  // the routed experts are always silu-gated; hidden_act is ignored
  topk_softmax(d);
  shared_of_routed_width(c, d, {"moe_num_shared_experts"});
  d.shared.activation.kind = gated_kind(c.string("hidden_act"), c.label());
  d.layout = WeightLayout::fused_transposed;
}
inline void cohere2(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"});
  topk_softmax(d);
  if (c.string("expert_selection_fn", {"softmax", "sigmoid"}) == "sigmoid") {
    d.router.scoring = Scoring::sigmoid;
    renormalise(d, c.flag("norm_topk_prob"));
  } else {
    c.ignore("norm_topk_prob");  // the softmax over the chosen logits is normalised in either case
  }
  shared_of_routed_width(c, d, {"num_shared_experts"}, true);
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

}  // namespace moe::io::detail::families
