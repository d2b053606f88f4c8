// SPDX-License-Identifier: Apache-2.0
// routing/topk_softmax.hpp: the k largest logits, then softmax over those k (gpt-oss, Granite, JetMoE, Aria).
#pragma once

#include "moe/routing/row/row_router.hpp"

namespace moe::routing {

namespace detail {
struct TopKSoftmaxConfig : PlainTopKConfig {
  static constexpr Scoring scoring = Scoring::softmax;
  static constexpr Order order = Order::topk_then_score;
  static constexpr Renorm renorm = Renorm::none;
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
  explicit TopKSoftmax(Params const& p) : RowRouter(detail::common_config<detail::TopKSoftmaxConfig>(p)) {}
};

}  // namespace moe::routing
