// SPDX-License-Identifier: Apache-2.0
// routing/sigmoid_topk.hpp: sigmoid of each logit, then the k largest (Cohere2 with sigmoid, LFM2 without bias).
#pragma once

#include "moe/routing/row/row_router.hpp"

namespace moe::routing {

namespace detail {
template <Renormalize R>
struct SigmoidTopKConfig : RouterConfig {
  static constexpr Scoring scoring = Scoring::sigmoid;
  static constexpr Order order = Order::score_then_topk;
  static constexpr Selection selection = Selection::topk;
  static constexpr Renorm renorm = R == Renormalize::yes ? Renorm::sum : Renorm::none;
  static constexpr int num_expert_group = 0;
  static constexpr int topk_group = 0;
  static constexpr float logit_softcap = 0.0F;
  static constexpr int num_zero_experts = 0;
  static constexpr int num_joint_shared = 0;
  static constexpr float const* correction_bias = nullptr;
};
}  // namespace detail

/// w = sigmoid(z)[ids], ids = topk(w); with Renormalize::yes w / (sum(w) + eps). docs/semantics/routing.md §4 Sigmoid and SigmoidRenorm.
template <Renormalize R>
class SigmoidTopK : public RowRouter<detail::SigmoidTopKConfig<R>> {
 public:
  static constexpr char const* kName = R == Renormalize::yes ? "sigmoid_topk_renormalize" : "sigmoid_topk";
  struct Params {
    int num_experts = 0;
    int topk = 0;
    float renorm_eps = 1e-20F;
    float routed_scaling_factor = 1.0F;
    int num_fused_shared = 0;
    float fused_shared_weight = 1.0F;
    DegeneratePolicy degenerate = DegeneratePolicy::uniform_first_k;
  };
  /// Throws E_CONFIG.
  explicit SigmoidTopK(Params const& p) : RowRouter<detail::SigmoidTopKConfig<R>>(config_of(p)) {}

 private:
  static detail::SigmoidTopKConfig<R> config_of(Params const& p) {
    detail::SigmoidTopKConfig<R> c;
    c.num_experts = p.num_experts;
    c.topk = p.topk;
    c.renorm_eps = p.renorm_eps;
    c.routed_scaling_factor = p.routed_scaling_factor;
    c.num_fused_shared = p.num_fused_shared;
    c.fused_shared_weight = p.fused_shared_weight;
    c.degenerate = p.degenerate;
    return c;
  }
};

}  // namespace moe::routing
