// SPDX-License-Identifier: Apache-2.0
// routing/grouped_topk.hpp: the k largest scores within the best groups of experts (DeepSeek-V2/V3, GLM-4, Mistral-4).
#pragma once

#include "moe/core/rule.hpp"
#include "moe/routing/row/row_router.hpp"

namespace moe::rules {
MOE_RULE(GroupedScoringFits,
         "moe: grouped top-k scores by softmax or sigmoid. Fix: choose Scoring::softmax or Scoring::sigmoid "
         "(docs/errors.md#router-scoring)");
}  // namespace moe::rules

namespace moe::routing {

namespace detail {
template <Scoring S, GroupScore G, Renormalize R>
struct GroupedTopKConfig : RouterConfig {
  static constexpr Scoring scoring = S;
  static constexpr Order order = Order::score_then_topk;
  static constexpr Selection selection = Selection::topk;
  static constexpr Renorm renorm = R == Renormalize::yes ? Renorm::sum : Renorm::none;
  static constexpr GroupScore group_score = G;
  static constexpr float logit_softcap = 0.0F;
  static constexpr int num_zero_experts = 0;
  static constexpr int num_joint_shared = 0;
  static constexpr float const* per_expert_scale = nullptr;
};
constexpr char const* grouped_topk_name(Scoring s, GroupScore g, Renormalize r) {
  bool const renormalize = r == Renormalize::yes;
  if (g == GroupScore::max) {
    if (s == Scoring::softmax) return renormalize ? "grouped_topk_softmax_max_renormalize" : "grouped_topk_softmax_max";
    return renormalize ? "grouped_topk_sigmoid_max_renormalize" : "grouped_topk_sigmoid_max";
  }
  if (s == Scoring::softmax) return renormalize ? "grouped_topk_softmax_top2_renormalize" : "grouped_topk_softmax_top2";
  return renormalize ? "grouped_topk_sigmoid_top2_renormalize" : "grouped_topk_sigmoid_top2";
}
}  // namespace detail

/// docs/semantics/routing.md §5: sel = score + bias; a group's score is its largest sel (DeepSeek-V2) or the sum of its two largest
/// (DeepSeek-V3); experts outside the topk_group best groups are masked with -inf; ids = topk(sel), w = unbiased score, renormalised if
/// asked, times the factor.
template <Scoring S, GroupScore G, Renormalize R>
class GroupedTopK : public RowRouter<detail::GroupedTopKConfig<S, G, R>> {
  static_assert(sizeof(MetRule<rules::GroupedScoringFits, S == Scoring::softmax || S == Scoring::sigmoid, Value<S>,
                               OneOf<Scoring::softmax, Scoring::sigmoid>>) == 1);

 public:
  static constexpr char const* kName = detail::grouped_topk_name(S, G, R);
  struct Params {
    int num_experts = 0;
    int topk = 0;
    int num_expert_group = 0;  ///< 1: executed as ungrouped
    int topk_group = 0;
    float const* correction_bias = nullptr;  ///< [E] in the router's space, or null
    float renorm_eps = 1e-20F;
    float routed_scaling_factor = 1.0F;
    int num_fused_shared = 0;
    float fused_shared_weight = 1.0F;
    DegeneratePolicy degenerate = DegeneratePolicy::uniform_first_k;
  };
  /// Throws E_CONFIG, also where the group fields are unset.
  explicit GroupedTopK(Params const& p) : RowRouter<detail::GroupedTopKConfig<S, G, R>>(config_of(p)) {}

 private:
  static detail::GroupedTopKConfig<S, G, R> config_of(Params const& p) {
    detail::require(p.num_expert_group != 0 && p.topk_group != 0, ErrorCode::config, "num_expert_group: ", p.num_expert_group,
                    " and topk_group: ", p.topk_group, " must be set for grouped top-k");
    auto c = detail::common_config<detail::GroupedTopKConfig<S, G, R>>(p);
    c.num_expert_group = p.num_expert_group;
    c.topk_group = p.topk_group;
    c.correction_bias = p.correction_bias;
    c.renorm_eps = p.renorm_eps;
    return c;
  }
};

}  // namespace moe::routing
