// SPDX-License-Identifier: Apache-2.0
// routing/sparsemixer.hpp: two argmax picks, each weighted by a softmax over the logits near its maximum (Phi-3.5-MoE).
#pragma once

#include "moe/routing/row/row_router.hpp"

namespace moe::routing {

namespace detail {
struct SparseMixerConfig : PlainConfig {
  static constexpr Scoring scoring = Scoring::softmax;
  static constexpr Order order = Order::score_then_topk;
  static constexpr Selection selection = Selection::sparsemixer;
  static constexpr Renorm renorm = Renorm::none;
};
}  // namespace detail

/// docs/semantics/routing.md §7. The two weights do not sum to one; that is intended.
class SparseMixer : public RowRouter<detail::SparseMixerConfig> {
 public:
  static constexpr char const* kName = "sparsemixer";
  struct Params {
    int num_experts = 0;
    int topk = 2;                       ///< must be 2
    float router_jitter_noise = 0.01F;  ///< eps: logits further than 2 eps below a pick's maximum, relative, leave its softmax
    bool renormalize = false;           ///< must be false
    DegeneratePolicy degenerate = DegeneratePolicy::uniform_first_k;
  };
  /// Throws E_ARG for another k or renormalize, else E_CONFIG.
  explicit SparseMixer(Params const& p) : RowRouter(config_of(p)) {}

 private:
  static detail::SparseMixerConfig config_of(Params const& p) {
    detail::require(!p.renormalize, ErrorCode::argument, "renormalize: true, sparsemixer needs false");
    detail::SparseMixerConfig c;
    c.num_experts = p.num_experts;
    c.topk = p.topk;
    c.sparsemixer_eps = p.router_jitter_noise;
    c.degenerate = p.degenerate;
    return c;
  }
};

}  // namespace moe::routing
