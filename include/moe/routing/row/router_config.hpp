// SPDX-License-Identifier: Apache-2.0
// routing/row/router_config.hpp: the vocabulary of routing: every choice a router can make, as one run-time value.
//
// A router policy is a type with the same member names as static constexpr values, so that route_row() compiles to exactly that
// router; RouterConfig itself is the policy whose choices are known only at run time (the command-line tool).
#pragma once

#include <cstdint>
#include <string_view>

#include "moe/core/types.hpp"

namespace moe::routing {

/// Score of a logit. identity: the raw logit ("TopK" routing). Formulas: docs/semantics/routing.md §3.
enum class Scoring : std::uint8_t { softmax, sigmoid, sqrtsoftplus, identity };
/// Whether the k experts are chosen by score or by logit, and how their weights follow.
enum class Order : std::uint8_t {
  score_then_topk,  ///< weights are the scores over all experts, taken at the chosen ones
  topk_then_score,  ///< weights are the score function over the k chosen logits only
};
/// How the k weights are normalised before the scaling factor.
enum class Renorm : std::uint8_t {
  none,
  sum,     ///< w / (sum + eps)
  floor,   ///< w / max(sum, eps)                     (ERNIE-4.5)
  p_norm,  ///< w / (sum w^p)^(1/p)                   (DBRX)
};
/// Of routers that know no other way: whether the k weights are divided by their sum.
enum class Renormalize : std::uint8_t { no, yes };
/// Score of a group of experts in grouped top-k.
enum class GroupScore : std::uint8_t { max, top2_sum };
/// How the experts are chosen.
enum class Selection : std::uint8_t {
  topk,         ///< the k largest selection values
  hash_table,   ///< looked up by token id
  sparsemixer,  ///< Phi-3.5: two masked argmax picks
};
/// What a zero expert adds to the output: nothing, or its input times its weight.
enum class ZeroExpertKind : std::uint8_t { none, identity };
/// What happens to a row for which no expert can be chosen.
enum class DegeneratePolicy : std::uint8_t { uniform_first_k, drop };

constexpr std::string_view name(Scoring s) {
  switch (s) {
    case Scoring::softmax: return "softmax";
    case Scoring::sigmoid: return "sigmoid";
    case Scoring::sqrtsoftplus: return "sqrtsoftplus";
    case Scoring::identity: return "identity";
  }
  return "?";
}

/// All choices of a router at run time. Pointers are borrowed, in the memory space that the router runs in.
struct RouterConfig {
  int num_experts = 0;  ///< E, logical routed experts
  int topk = 0;         ///< k, 1 … kMaxTopK
  Scoring scoring = Scoring::softmax;
  Order order = Order::score_then_topk;
  Selection selection = Selection::topk;
  Renorm renorm = Renorm::none;
  float renorm_eps = 1e-20F;           ///< eps of Renorm::sum, floor of Renorm::floor
  float renorm_p = 1.0F;               ///< p of Renorm::p_norm
  float routed_scaling_factor = 1.0F;  ///< multiplies the weights, renormalised or not
  int num_expert_group = 0;            ///< G; 0 or 1: ungrouped
  int topk_group = 0;                  ///< groups kept
  GroupScore group_score = GroupScore::max;
  float logit_softcap = 0.0F;     ///< z = c tanh(z / c); 0: off
  float sparsemixer_eps = 0.01F;  ///< jitter of Selection::sparsemixer
  int num_zero_experts = 0;       ///< Z: logits E … E+Z-1 choose the identity
  ZeroExpertKind zero_expert_kind = ZeroExpertKind::identity;
  int num_fused_shared = 0;  ///< S_f: ids E … E+S_f-1 appended to every row
  float fused_shared_weight = 1.0F;
  int num_joint_shared = 0;  ///< shared experts whose logits E … E+S-1 are normalised with the chosen (Inkling)
  DegeneratePolicy degenerate = DegeneratePolicy::uniform_first_k;
  float const* correction_bias = nullptr;    ///< [E + Z] selection only, or null
  float const* per_expert_scale = nullptr;   ///< [E] multiplies the final weights (Gemma-4), or null
  std::int64_t const* hash_table = nullptr;  ///< [vocabulary, k] expert ids, or null
  std::int64_t vocabulary = 0;
  /// Tokens of one sequence that an expert takes (Switch); later ones get no expert: id -1, weight 0. 0: all. Needs top-1. On the host.
  std::int64_t expert_capacity = 0;

  /// Width of router_logits: E + Z + joint shared.
  MOE_HD constexpr int num_logits() const { return num_experts + num_zero_experts + num_joint_shared; }
  /// Width of topk_ids and topk_weights: k + fused shared.
  MOE_HD constexpr int num_slots() const { return topk + num_fused_shared; }
};

namespace detail {

/// The fixed choices of routers without groups, a selection bias, zero experts and joint shared experts.
struct PlainConfig : RouterConfig {
  static constexpr int num_expert_group = 0;
  static constexpr int topk_group = 0;
  static constexpr int num_zero_experts = 0;
  static constexpr int num_joint_shared = 0;
  static constexpr float const* correction_bias = nullptr;
};
/// Of those that choose the k largest, without a cap on the logits.
struct PlainTopKConfig : PlainConfig {
  static constexpr Selection selection = Selection::topk;
  static constexpr float logit_softcap = 0.0F;
};

/// The configuration with what all routers of scored experts take from their Params; the rest is as in Config.
template <class Config, class Params>
Config common_config(Params const& p) {
  Config c;
  c.num_experts = p.num_experts;
  c.topk = p.topk;
  c.routed_scaling_factor = p.routed_scaling_factor;
  c.num_fused_shared = p.num_fused_shared;
  c.fused_shared_weight = p.fused_shared_weight;
  c.degenerate = p.degenerate;
  return c;
}

}  // namespace detail

}  // namespace moe::routing
