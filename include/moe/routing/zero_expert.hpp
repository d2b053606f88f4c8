// SPDX-License-Identifier: Apache-2.0
// routing/zero_expert.hpp: real and zero-computation experts compete for the k slots (LongCat-Flash, Zaya).
#pragma once

#include "moe/routing/row/row_router.hpp"

namespace moe::routing {

namespace detail {
template <Scoring S, Renormalize R>
struct ZeroExpertConfig : RouterConfig {
  static constexpr Scoring scoring = S;
  static constexpr Order order = Order::score_then_topk;
  static constexpr Selection selection = Selection::topk;
  static constexpr Renorm renorm = R == Renormalize::yes ? Renorm::sum : Renorm::none;
  static constexpr int num_expert_group = 0;
  static constexpr int topk_group = 0;
  static constexpr int num_fused_shared = 0;
  static constexpr int num_joint_shared = 0;
};
constexpr char const* zero_expert_name(Scoring s, Renormalize r) {
  bool const renormalize = r == Renormalize::yes;
  switch (s) {
    case Scoring::softmax: return renormalize ? "zero_expert_softmax_renormalize" : "zero_expert_softmax";
    case Scoring::sigmoid: return renormalize ? "zero_expert_sigmoid_renormalize" : "zero_expert_sigmoid";
    case Scoring::sqrtsoftplus: return renormalize ? "zero_expert_sqrtsoftplus_renormalize" : "zero_expert_sqrtsoftplus";
    case Scoring::identity: return renormalize ? "zero_expert_identity_renormalize" : "zero_expert_identity";
  }
  return "";
}
}  // namespace detail

/// docs/semantics/routing.md §10: E + Z logits; ids E … E+Z-1 are zero experts. routing/zero_experts.hpp adds what they contribute and
/// takes them out of the slots before dispatch.
template <Scoring S, Renormalize R>
class ZeroExpert : public RowRouter<detail::ZeroExpertConfig<S, R>> {
 public:
  static constexpr char const* kName = detail::zero_expert_name(S, R);
  struct Params {
    int num_experts = 0;
    int num_zero_experts = 0;
    ZeroExpertKind zero_expert_kind = ZeroExpertKind::identity;
    int topk = 0;
    float const* correction_bias = nullptr;  ///< [E + Z] in the router's space, or null
    float renorm_eps = 1e-20F;
    float routed_scaling_factor = 1.0F;
    DegeneratePolicy degenerate = DegeneratePolicy::uniform_first_k;
  };
  /// Throws E_CONFIG.
  explicit ZeroExpert(Params const& p) : RowRouter<detail::ZeroExpertConfig<S, R>>(config_of(p)) {}

 private:
  static detail::ZeroExpertConfig<S, R> config_of(Params const& p) {
    detail::ZeroExpertConfig<S, R> c;
    c.num_experts = p.num_experts;
    c.num_zero_experts = p.num_zero_experts;
    c.zero_expert_kind = p.zero_expert_kind;
    c.topk = p.topk;
    c.correction_bias = p.correction_bias;
    c.renorm_eps = p.renorm_eps;
    c.routed_scaling_factor = p.routed_scaling_factor;
    c.degenerate = p.degenerate;
    return c;
  }
};

}  // namespace moe::routing
