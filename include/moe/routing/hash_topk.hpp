// SPDX-License-Identifier: Apache-2.0
// routing/hash_topk.hpp: a table by token id chooses the experts, their scores weight them (the first layers of DeepSeek-V4).
#pragma once

#include "moe/routing/row/row_router.hpp"

namespace moe::routing {

namespace detail {
template <Scoring S, Renormalize R>
struct HashTopKConfig : PlainConfig {
  static constexpr Scoring scoring = S;
  static constexpr Order order = Order::score_then_topk;
  static constexpr Selection selection = Selection::hash_table;
  static constexpr Renorm renorm = R == Renormalize::yes ? Renorm::sum : Renorm::none;
};
constexpr char const* hash_topk_name(Scoring s, Renormalize r) {
  bool const renormalize = r == Renormalize::yes;
  switch (s) {
    case Scoring::softmax: return renormalize ? "hash_topk_softmax_renormalize" : "hash_topk_softmax";
    case Scoring::sigmoid: return renormalize ? "hash_topk_sigmoid_renormalize" : "hash_topk_sigmoid";
    case Scoring::sqrtsoftplus: return renormalize ? "hash_topk_sqrtsoftplus_renormalize" : "hash_topk_sqrtsoftplus";
    case Scoring::identity: return renormalize ? "hash_topk_identity_renormalize" : "hash_topk_identity";
  }
  return "";
}
}  // namespace detail

/// docs/semantics/routing.md §6: ids = table[token_id], w = score[ids], renormalised if asked, times the factor. A token outside the
/// vocabulary gets ids -1.
template <Scoring S, Renormalize R>
class HashTopK : public RowRouter<detail::HashTopKConfig<S, R>> {
 public:
  static constexpr char const* kName = detail::hash_topk_name(S, R);
  struct Params {
    int num_experts = 0;
    int topk = 0;
    std::int64_t const* hash_table = nullptr;  ///< [vocabulary, k] in the router's space
    std::int64_t vocabulary = 0;
    float renorm_eps = 1e-20F;
    float routed_scaling_factor = 1.0F;
    int num_fused_shared = 0;
    float fused_shared_weight = 1.0F;
    DegeneratePolicy degenerate = DegeneratePolicy::uniform_first_k;
  };
  /// Throws E_CONFIG; E_ARG if the table is null.
  explicit HashTopK(Params const& p) : RowRouter<detail::HashTopKConfig<S, R>>(config_of(p)) {}

 private:
  static detail::HashTopKConfig<S, R> config_of(Params const& p) {
    auto c = detail::common_config<detail::HashTopKConfig<S, R>>(p);
    c.hash_table = p.hash_table;
    c.vocabulary = p.vocabulary;
    c.renorm_eps = p.renorm_eps;
    return c;
  }
};

}  // namespace moe::routing
