// SPDX-License-Identifier: Apache-2.0
// io/families.hpp: the model families: from a config.json and a layer index to what that layer's MoE block computes.
//
// One function per family, which uses the field names of that family's configuration. A constant appears here only if no configuration
// states it, or as the default of the model's class for a field that a configuration may leave out. Any other missing field is an error; a
// field that is stated but not read is refused (io/unread_fields.hpp).
#pragma once

#include <cstdint>

#include "moe/io/families_biased.hpp"
#include "moe/io/families_softmax.hpp"
#include "moe/io/family_fields.hpp"
#include "moe/io/one_line.hpp"

namespace moe::io::detail::families {

// further rules

inline void deepseek_v4(Config c, Out d, std::int64_t layer) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"}, "");
  if (c.has("hidden_act")) c.string("hidden_act", {"silu"});
  c.string("scoring_func", {"sqrtsoftplus"});
  d.router.scoring = Scoring::sqrtsoftplus;
  if (!c.flag("norm_topk_prob")) {
    throw Error(ErrorCode::unsupported, one_line("'", c.label(), "': norm_topk_prob is false, and deepseek_v4 always normalises"));
  }
  renormalise(d, true, 1e-20F);
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
  bool const hash = c.has("mlp_layer_types") ? c.at("mlp_layer_types", layer) == "hash_moe" : layer < c.integer("num_hash_layers", 0);
  if (hash) d.router.selection = Selection::hash_table;
  d.correction_bias = !hash;
  clamped_silu(c, d);
  if (c.has("n_shared_experts")) (void)c.integer("n_shared_experts", 1, 1);  // must be 1: the model always has one shared expert
  shared_of_routed_width(c, d, {"n_shared_experts"});
}
inline void ernie(Config c, Out d) {
  shapes(c, d, {"moe_k", "num_experts_per_tok"}, {"moe_intermediate_size"});
  d.correction_bias = true;
  d.router.renorm = Renorm::floor;
  d.router.renorm_eps = c.has("moe_norm_min") ? static_cast<float>(c.number("moe_norm_min", 0.0, 1.0)) : 1e-12F;
  shared_of_routed_width(c, d, {"moe_num_shared_experts"});
}
/// Each layer has an ERNIE-4.5 block for text tokens and one for image tokens, which differ in their experts' width. The shared experts
/// are those of both, as wide as text experts (Ernie4_5_VLMoeMoeBlock of transformers).
inline void ernie_vl(Config c, Out d) {
  if (d.tokens == Tokens::all) d.tokens = Tokens::text;
  d.hidden = c.integer("hidden_size");
  (void)c.at("moe_intermediate_size", 1);  // refuses a single number: text and image experts have a width each
  std::int64_t const text_width = c.integer_at("moe_intermediate_size", 0), image_width = c.integer_at("moe_intermediate_size", 1);
  d.intermediate = d.tokens == Tokens::image ? image_width : text_width;
  d.router.num_experts = static_cast<int>(c.integer({"moe_num_experts", "num_experts"}, 1, 65536));
  d.router.topk = static_cast<int>(c.integer({"moe_k", "num_experts_per_tok"}, 1, kMaxTopK));
  d.activation.kind = gated_kind(c.string("hidden_act"), c.label());
  d.correction_bias = true;
  d.router.renorm = Renorm::floor;
  d.router.renorm_eps = static_cast<float>(c.number("moe_norm_min", 0.0, 1.0));
  std::int64_t const n = c.integer("moe_num_shared_experts", 0, 1024);
  shared(d, n, n * text_width);
}
/// The encoder's blocks, as NllbMoeTop2Router of transformers computes them: softmax, the best two, normalised. With a capacity of all
/// tokens no expert is ever full: a token's two choices differ, so an expert gets at most one row of each token.
inline void nllb(Config c, Out d) {
  d.hidden = c.integer({"d_model", "hidden_size"});
  d.intermediate = c.integer("encoder_ffn_dim");
  d.router.num_experts = static_cast<int>(c.integer("num_experts", 2, 65536));
  d.router.topk = 2;
  d.activation.kind = ungated_kind(c.string("activation_function"), c.label());
  d.router_bias = c.flag("router_bias");
  c.string("router_dtype", {"float32"});
  c.string("second_expert_policy", {"all"});  // the other policies are random
  renormalise(d, true);
  double const fraction = c.number("moe_eval_capacity_token_fraction", -1e6, 1e6);
  if (fraction < 1.0) {
    throw Error(ErrorCode::unsupported, one_line("'", c.label(), "': moe_eval_capacity_token_fraction is ", fraction,
                                                 ": below 1, experts drop tokens beyond a capacity that depends on the whole batch"));
  }
  // Dropout of expert outputs; the model multiplies by what it keeps. 1 would leave nothing.
  d.output_scaling_factor = static_cast<float>(1.0 - c.number("moe_token_dropout", 0.0, 0.999));
  d.expert_bias = true;
}
inline void longcat_flash(Config c, Out d) {
  shapes(c, d, {"moe_topk", "num_experts_per_tok"}, {"expert_ffn_hidden_size"}, c.has("hidden_act") ? "hidden_act" : "");
  d.correction_bias = true;
  d.router.num_zero_experts = static_cast<int>(c.integer("zero_expert_num", 0, 65536));
  if (c.has("zero_expert_type")) c.string("zero_expert_type", {"identity"});
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");  // never normalised: norm_topk_prob of true is refused as unread
}
inline void mistral4(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  groups(c, d, "n_group", "topk_group", GroupScore::top2_sum);
  renormalise(d, c.flag("norm_topk_prob"), 1e-20F);
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
  shared_of_routed_width(c, d, {"n_shared_experts"});
}
inline void mistral_large4(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  groups(c, d, "n_group", "topk_group", GroupScore::top2_sum);
  renormalise(d, true, 1e-20F);
  d.router.routed_scaling_factor = c.positive("routed_scaling_factor");
  shared_of_routed_width(c, d, {"n_shared_experts"});
}
/// Sigmoid scores without a bias.
inline void flint(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  d.router.scoring = Scoring::sigmoid;
  renormalise(d, c.flag("norm_topk_prob"));
  shared(d, 1, c.integer("shared_expert_intermediate_size"));
}
/// The experts are the largest logits plus bias, the weights the sigmoid of the chosen logits.
inline void kolibri1(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  d.router.order = Order::topk_then_score;
  d.router.scoring = Scoring::sigmoid;
  d.correction_bias = true;
  renormalise(d, c.flag("norm_topk_prob"));
  shared(d, 1, c.integer("shared_expert_intermediate_size"));
}
inline void phimoe(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size"});
  d.router.selection = Selection::sparsemixer;
  d.router.sparsemixer_eps = static_cast<float>(c.number("router_jitter_noise", 0.0, 1.0));
}
inline void gemma4(Config c, Out d) {
  shapes(c, d, {"top_k_experts", "num_experts_per_tok"}, {"moe_intermediate_size", "expert_intermediate_size"}, "hidden_activation");
  renormalise(d, true);
  d.per_expert_scale = true;
  d.router_input = RouterInput::scaled_rms_norm;
  d.rms_norm_eps = c.positive("rms_norm_eps");
}
inline void inkling(Config c, Out d) {
  // If dense_intermediate_size is stated, it is the dense layers' width and intermediate_size is an expert's.
  if (c.has("dense_intermediate_size")) {
    shapes(c, d, {"num_experts_per_tok"}, {"intermediate_size", "moe_intermediate_size"});
  } else {
    shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  }
  biased_sigmoid(d);
  renormalise(d, true);
  d.router.routed_scaling_factor = c.positive("route_scale");
  if (!c.flag("shared_expert_sink")) c.fail("'shared_expert_sink' is false, which is not known");
  std::int64_t const n = c.integer("n_shared_experts", 1, 64);
  shared(d, n, n * d.intermediate, SharedGate::routing_weight);
  d.router.num_joint_shared = static_cast<int>(n);
}
/// An expert per data set, which the caller names (io/common_rows.hpp).
inline void vitpose(Config c, Out d) {
  d.hidden = c.integer("hidden_size");
  d.intermediate = static_cast<std::int64_t>(static_cast<double>(d.hidden) * c.number("mlp_ratio", 1e-3, 1e3));
  if (d.intermediate < 1 || d.intermediate > kMaxConfigValue) {
    c.fail(one_line("hidden_size ", d.hidden, " times 'mlp_ratio' is ", d.intermediate, ", out of range [1, ", kMaxConfigValue, "]"));
  }
  d.router.num_experts = static_cast<int>(c.integer("num_experts", 2, 65536));
  d.router.topk = 1;
  d.router.selection = Selection::hash_table;
  renormalise(d, true);
  d.activation.kind = ungated_kind(c.string("hidden_act"), c.label());
  d.expert_bias = d.expert_of_id = true;
  d.own_rows = c.integer("part_features", 1, d.hidden - 1);
  d.layout = WeightLayout::common_rows;
}
inline void zaya(Config c, Out d) {
  shapes(c, d, {"num_experts_per_tok"}, {"moe_intermediate_size"});
  d.correction_bias = true;
  d.router_input = RouterInput::mlp;
  d.rms_norm_eps = c.positive("rms_norm_eps");
  d.router.num_zero_experts = 1;
  d.router.zero_expert_kind = routing::ZeroExpertKind::none;
}

}  // namespace moe::io::detail::families
