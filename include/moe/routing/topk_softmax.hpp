// SPDX-License-Identifier: Apache-2.0
// routing/topk_softmax.hpp: the k largest logits, then softmax over those k (gpt-oss, Granite, JetMoE, Aria).
#pragma once

#include "moe/routing/row/row_router.hpp"

namespace moe::routing {

namespace detail {
struct TopKSoftmaxConfig : RouterConfig {
  static constexpr Scoring scoring = Scoring::softmax;
  static constexpr Order order = Order::topk_then_score;
  static constexpr Selection selection = Selection::topk;
  static constexpr Renorm renorm = Renorm::none;
  static constexpr int num_expert_group = 0;
  static constexpr int topk_group = 0;
  static constexpr float logit_softcap = 0.0F;
  static constexpr int num_zero_experts = 0;
  static constexpr int num_joint_shared = 0;
  static constexpr float const* correction_bias = nullptr;
};
}  // namespace detail

/// ids = topk(z), w = softmax(z[ids]). docs/semantics/routing.md §4 Renormalize.
class TopKSoftmax : public RowRouter<detail::TopKSoftmaxConfig> {
 public:
  static constexpr char const* kName = "topk_softmax";
  struct Params {
    int num_experts = 0;
    int topk = 0;
    float routed_scaling_factor = 1.0F;
    int num_fused_shared = 0;
    float fused_shared_weight = 1.0F;
    DegeneratePolicy degenerate = DegeneratePolicy::uniform_first_k;
  };
  /// Throws E_CONFIG.
  explicit TopKSoftmax(Params const& p) : RowRouter(config_of(p)) {}

 private:
  static detail::TopKSoftmaxConfig config_of(Params const& p) {
    detail::TopKSoftmaxConfig c;
    c.num_experts = p.num_experts;
    c.topk = p.topk;
    c.routed_scaling_factor = p.routed_scaling_factor;
    c.num_fused_shared = p.num_fused_shared;
    c.fused_shared_weight = p.fused_shared_weight;
    c.degenerate = p.degenerate;
    return c;
  }
};

}  // namespace moe::routing
