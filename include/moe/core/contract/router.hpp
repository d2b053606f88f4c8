// SPDX-License-Identifier: Apache-2.0
// core/contract/router.hpp: what a Router must have: logits → (ids, weights).
//
// Besides the members below a router has, for host layers,      template <class L> void select(RouteArgs<L> const&) const;
// and for layers on the device                                 template <class L> void select(RouteArgs<L> const&, cudaStream_t) const;
// which routers with the base class routing::RowRouter<Config> have (facts::chooses_by_row() in routing/row/row_router.hpp).
// routing/row/route_args.hpp describes what select() reads and writes; layer/contract.hpp checks it.
#pragma once

#include <concepts>
#include <tuple>

#include "moe/core/contract/policy.hpp"
#include "moe/core/rule.hpp"

namespace moe {

/// Multiplies the expert's input, not its output, by the router weight (Llama-4).
template <class R>
concept RouterHasWeightOnInput = requires {
  { R::kWeightOnInput } -> std::convertible_to<bool>;
};
MOE_MEMBER(RouterHasWeightOnInput, "the router", "static constexpr bool kWeightOnInput", "the weight multiplies the expert's input");

/// Params are validated by the constructor (E_CONFIG).
template <class R>
concept RouterHasParams = HasParams<R> && std::constructible_from<R, typename R::Params const&>;
MOE_MEMBER(RouterHasParams, "the router", "explicit Router(Params const&)", "a struct Params, and the constructor that validates it");

/// Logical experts to choose from, without zero experts.
template <class R>
concept RouterHasNumExperts = requires(R const& r) {
  { r.num_experts() } -> std::convertible_to<int>;
};
MOE_MEMBER(RouterHasNumExperts, "the router", "int num_experts() const", "logical experts");

/// Experts per token.
template <class R>
concept RouterHasTopK = requires(R const& r) {
  { r.topk() } -> std::convertible_to<int>;
};
MOE_MEMBER(RouterHasTopK, "the router", "int topk() const", "experts per token");

/// Width of router_logits.
template <class R>
concept RouterHasNumLogits = requires(R const& r) {
  { r.num_logits() } -> std::convertible_to<int>;
};
MOE_MEMBER(RouterHasNumLogits, "the router", "int num_logits() const", "width of router_logits");

/// Width of topk_ids: topk() and the fused shared experts.
template <class R>
concept RouterHasNumSlots = requires(R const& r) {
  { r.num_slots() } -> std::convertible_to<int>;
};
MOE_MEMBER(RouterHasNumSlots, "the router", "int num_slots() const", "width of topk_ids: k and the fused shared experts");

namespace detail {
template <class R>
using RouterContract =
    std::tuple<Verdict<rules::PolicyHasName, Named<R>, R>, Verdict<rules::RouterHasWeightOnInput, RouterHasWeightOnInput<R>, R>,
               Verdict<rules::RouterHasParams, RouterHasParams<R>, R>, Verdict<rules::RouterHasNumExperts, RouterHasNumExperts<R>, R>,
               Verdict<rules::RouterHasTopK, RouterHasTopK<R>, R>, Verdict<rules::RouterHasNumLogits, RouterHasNumLogits<R>, R>,
               Verdict<rules::RouterHasNumSlots, RouterHasNumSlots<R>, R>>;
}  // namespace detail

template <class R>
concept Router = detail::kAllHold<detail::RouterContract<R>>;

}  // namespace moe
