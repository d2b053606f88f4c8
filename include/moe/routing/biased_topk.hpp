// SPDX-License-Identifier: Apache-2.0
// routing/biased_topk.hpp: scores plus a correction bias choose the experts, the scores alone weight them (MiniMax-M2, ERNIE-4.5,
// DeepSeek-V4).
#pragma once

#include "moe/routing/row/row_router.hpp"

namespace moe::routing {

namespace detail {
template <Scoring S, Renormalize R>
struct BiasedTopKConfig : RouterConfig {
  static constexpr Scoring scoring = S;
  static constexpr Order order = Order::score_then_topk;
  static constexpr Selection selection = Selection::topk;
  static constexpr int num_expert_group = 0;
  static constexpr int topk_group = 0;
  static constexpr int num_zero_experts = 0;
};
constexpr char const* biased_topk_name(Scoring s, Renormalize r) {
  bool const renormalize = r == Renormalize::yes;
  switch (s) {
    case Scoring::softmax: return renormalize ? "biased_topk_softmax_renormalize" : "biased_topk_softmax";
    case Scoring::sigmoid: return renormalize ? "biased_topk_sigmoid_renormalize" : "biased_topk_sigmoid";
    case Scoring::sqrtsoftplus: return renormalize ? "biased_topk_sqrtsoftplus_renormalize" : "biased_topk_sqrtsoftplus";
    case Scoring::identity: return renormalize ? "biased_topk_identity_renormalize" : "biased_topk_identity";
  }
  return "";
}
}  // namespace detail

/// docs/semantics/routing.md §6: ids = topk(score + bias), w = score[ids], renormalised if asked, times the factor.
template <Scoring S, Renormalize R>
class BiasedTopK : public RowRouter<detail::BiasedTopKConfig<S, R>> {
 public:
  static constexpr char const* kName = detail::biased_topk_name(S, R);
  struct Params {
    int num_experts = 0;
    int topk = 0;
    float const* correction_bias = nullptr;  ///< [E] in the router's space
    Renorm renorm = Renorm::sum;             ///< with Renormalize::yes: ERNIE-4.5 divides by max(sum, eps)
    float renorm_eps = 1e-20F;
    float routed_scaling_factor = 1.0F;
    float logit_softcap = 0.0F;
    int num_fused_shared = 0;
    float fused_shared_weight = 1.0F;
    int num_joint_shared = 0;  ///< shared experts whose scores are normalised with the chosen (Inkling)
    DegeneratePolicy degenerate = DegeneratePolicy::uniform_first_k;
  };
  /// Throws E_CONFIG; E_ARG if the bias is null.
  explicit BiasedTopK(Params const& p) : RowRouter<detail::BiasedTopKConfig<S, R>>(config_of(p)) {}

 private:
  static detail::BiasedTopKConfig<S, R> config_of(Params const& p) {
    detail::require(p.correction_bias != nullptr, ErrorCode::argument, "correction_bias: null, expected ", p.num_experts, " values");
    auto c = detail::common_config<detail::BiasedTopKConfig<S, R>>(p);
    c.correction_bias = p.correction_bias;
    c.renorm = R == Renormalize::yes ? p.renorm : Renorm::none;
    c.renorm_eps = p.renorm_eps;
    c.logit_softcap = p.logit_softcap;
    c.num_joint_shared = p.num_joint_shared;
    return c;
  }
};

}  // namespace moe::routing
