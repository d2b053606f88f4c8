// SPDX-License-Identifier: Apache-2.0
// routing/row/validate.hpp: refuses router configurations and calls that cannot work (docs/semantics/routing.md §14), each with the value
// and the bound.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string_view>

#include "moe/core/buffer.hpp"
#include "moe/core/error.hpp"
#include "moe/core/types.hpp"
#include "moe/routing/row/route_args.hpp"
#include "moe/routing/row/router_config.hpp"
#include "moe/routing/row/score.hpp"

namespace moe::routing {

/// The scoring function of that name. Throws E_CONFIG naming the valid ones.
inline Scoring parse_scoring(std::string_view scoring) {
  for (Scoring s : {Scoring::softmax, Scoring::sigmoid, Scoring::sqrtsoftplus, Scoring::identity}) {
    if (name(s) == scoring) return s;
  }
  throw Error(ErrorCode::config, text("scoring: '", scoring, "' is none of softmax, sigmoid, sqrtsoftplus, identity"));
}

/// Refuses router logits that no router reads. Throws E_UNSUPPORTED.
inline void check_logits_dtype(DType dtype) {
  if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16) {
    throw Error(ErrorCode::unsupported, text("router_logits: dtype ", name(dtype), " is none of f32, bf16, f16"));
  }
}

/// Every choice of a router policy as one run-time value, whether the policy fixed it or not.
template <class Config>
constexpr RouterConfig resolve(Config const& c) {
  RouterConfig r;
  r.num_experts = c.num_experts;
  r.topk = c.topk;
  r.scoring = c.scoring;
  r.order = c.order;
  r.selection = c.selection;
  r.renorm = c.renorm;
  r.renorm_eps = c.renorm_eps;
  r.renorm_p = c.renorm_p;
  r.routed_scaling_factor = c.routed_scaling_factor;
  r.num_expert_group = c.num_expert_group;
  r.topk_group = c.topk_group;
  r.group_score = c.group_score;
  r.logit_softcap = c.logit_softcap;
  r.sparsemixer_eps = c.sparsemixer_eps;
  r.num_zero_experts = c.num_zero_experts;
  r.zero_expert_kind = c.zero_expert_kind;
  r.num_fused_shared = c.num_fused_shared;
  r.fused_shared_weight = c.fused_shared_weight;
  r.num_joint_shared = c.num_joint_shared;
  r.degenerate = c.degenerate;
  r.correction_bias = c.correction_bias;
  r.per_expert_scale = c.per_expert_scale;
  r.hash_table = c.hash_table;
  r.vocabulary = c.vocabulary;
  r.expert_capacity = c.expert_capacity;
  return r;
}

namespace detail {

template <class... Parts>
void require(bool holds, ErrorCode code, Parts const&... parts) {
  if (!holds) throw Error(code, text(parts...));
}

inline void validate_groups(RouterConfig const& c) {
  auto const e_config = ErrorCode::config;
  int const g = c.num_expert_group;
  require(g >= 0, e_config, "num_expert_group: ", g, " is below 0");
  if (g == 0) {
    require(c.topk_group == 0, e_config, "num_expert_group: 0 with topk_group ", c.topk_group, ": both must be set for grouped top-k");
    return;
  }
  require(c.topk_group != 0, e_config, "topk_group: 0 with num_expert_group ", g, ": both must be set for grouped top-k");
  require(c.num_experts % g == 0, e_config, "num_expert_group: ", g, " does not divide num_experts ", c.num_experts);
  require(c.topk_group >= 1 && c.topk_group <= g, e_config, "topk_group: ", c.topk_group, " is out of range [1, ", g, "]");
  int const size = c.num_experts / g;
  require(static_cast<std::int64_t>(c.topk) <= static_cast<std::int64_t>(c.topk_group) * size, e_config, "topk_group: ", c.topk_group,
          " groups of ", size, " experts hold less than top_k ", c.topk);
  require(g == 1 || size >= 2 || (c.correction_bias == nullptr && c.group_score == GroupScore::max), e_config, "num_expert_group: ", g,
          " leaves groups of ", size, " expert, a group score of two needs at least 2");
  require(g == 1 || c.num_zero_experts == 0, e_config, "num_expert_group: ", g, " with num_zero_experts ", c.num_zero_experts,
          ": zero experts belong to no group");
}

/// Each would give weights that are not numbers, or change their sign or order.
inline void validate_numbers(RouterConfig const& c) {
  auto const e_config = ErrorCode::config;
  auto const finite = [&](char const* what, float x) { require(std::isfinite(x), e_config, what, ": ", x, " is not a finite number"); };
  auto const at_least_0 = [&](char const* what, float x) {
    finite(what, x);
    require(x >= 0.0F, e_config, what, ": ", x, " is below 0");
  };
  at_least_0("logit_softcap", c.logit_softcap);
  at_least_0("renorm_eps", c.renorm_eps);
  finite("renorm_p", c.renorm_p);
  require(c.renorm != Renorm::p_norm || c.renorm_p > 0.0F, e_config, "renorm_p: ", c.renorm_p, " is not above 0");
  finite("routed_scaling_factor", c.routed_scaling_factor);
  finite("fused_shared_weight", c.fused_shared_weight);
  if (c.selection == Selection::sparsemixer) at_least_0("sparsemixer_eps (router_jitter_noise)", c.sparsemixer_eps);
}

}  // namespace detail

/// Refuses configurations that cannot work: E_CONFIG, or E_ARG for sparsemixer's arguments and missing tables.
inline void validate(RouterConfig const& c) {
  using detail::require;
  auto const e_config = ErrorCode::config;
  require(c.num_experts >= 1, e_config, "num_experts: ", c.num_experts, " is below 1");
  require(c.num_zero_experts >= 0, e_config, "num_zero_experts: ", c.num_zero_experts, " is below 0");
  require(c.num_fused_shared >= 0 && c.num_fused_shared <= kMaxTopK, e_config, "num_fused_shared: ", c.num_fused_shared,
          " is out of range [0, ", kMaxTopK, "]");
  require(c.num_joint_shared >= 0 && c.num_joint_shared <= kMaxTopK, e_config, "num_joint_shared: ", c.num_joint_shared,
          " is out of range [0, ", kMaxTopK, "]");
  std::int64_t const logits = std::int64_t{c.num_experts} + c.num_zero_experts + c.num_joint_shared;
  require(logits <= kMaxLogits, e_config, "num_experts: ", logits, " logits per token, at most ", kMaxLogits);
  int const most = std::min(kMaxTopK, c.num_experts + c.num_zero_experts);
  if (c.selection == Selection::sparsemixer) {
    require(c.topk == 2, ErrorCode::argument, "top_k: ", c.topk, ", sparsemixer needs 2");
    require(c.renorm == Renorm::none, ErrorCode::argument, "renormalize: true, sparsemixer needs false");
    require(c.scoring == Scoring::softmax && c.correction_bias == nullptr && c.num_expert_group <= 1 && c.num_zero_experts == 0, e_config,
            "selection: sparsemixer takes softmax without bias, groups or zero experts");
  }
  require(c.topk >= 1 && c.topk <= most, e_config, "top_k: ", c.topk, " is out of range [1, ", most, "]");
  require(c.num_fused_shared == 0 || c.num_zero_experts == 0, e_config, "num_fused_shared: ", c.num_fused_shared, " with num_zero_experts ",
          c.num_zero_experts, ": both number their ids from num_experts");
  detail::validate_groups(c);
  require(c.correction_bias == nullptr || c.order == Order::score_then_topk || c.scoring != Scoring::softmax, e_config,
          "correction_bias: needs score_then_topk, the order is topk_then_score with softmax");
  require(c.num_joint_shared == 0 || c.scoring != Scoring::softmax, e_config, "num_joint_shared: ", c.num_joint_shared,
          " needs a score of one logit, the scoring is softmax");
  detail::validate_numbers(c);
  require(c.expert_capacity >= 0, e_config, "expert_capacity: ", c.expert_capacity, " is below 0");
  require(c.expert_capacity == 0 || (c.topk == 1 && c.num_slots() == 1), e_config, "expert_capacity: ", c.expert_capacity, " with top_k ",
          c.topk, " and num_fused_shared ", c.num_fused_shared, ": needs one expert a token");
  if (c.selection == Selection::hash_table) {
    require(c.hash_table != nullptr, ErrorCode::argument, "hash_table: null, hash routing needs a table of [vocabulary, top_k]");
    require(c.vocabulary >= 1, e_config, "vocabulary: ", c.vocabulary, " is below 1");
    require(c.num_expert_group <= 1, e_config, "num_expert_group: ", c.num_expert_group,
            " with a hash table, which chooses from all experts");
  }
}

/// Refuses a correction bias of another length than the selectable logits. Throws E_ARG.
inline void check_bias_length(std::int64_t length, int num_experts, int num_zero_experts = 0) {
  detail::require(length == std::int64_t{num_experts} + num_zero_experts, ErrorCode::argument, "correction_bias: length ", length,
                  ", expected ", num_experts + num_zero_experts);
}

/// Checks the logits of a router that reads them; the simulator and a custom routing function may have none. E_ARG.
template <class L>
void check_logits(RouteArgs<L> const& a) {
  moe::detail::check_rows("router_logits", a.logits);
}

/// Refuses arrays that do not fit the router. Throws E_ARG naming the array, its shape and the expected one.
template <class L>
void check_args(RouterConfig const& c, RouteArgs<L> const& a) {
  using detail::require;
  static_assert(dtype_of<L> == DType::f32 || dtype_of<L> == DType::bf16 || dtype_of<L> == DType::f16, "router logits are f32, bf16 or f16");
  auto const e_arg = ErrorCode::argument;
  std::int64_t const m = a.logits.extent(0);
  require(a.logits.extent(1) == c.num_logits(), e_arg, "router_logits: shape [", m, ", ", a.logits.extent(1), "], expected [", m, ", ",
          c.num_logits(), "]");
  require(a.num_valid_rows >= 0 && a.num_valid_rows <= m, e_arg, "num_valid_rows: ", a.num_valid_rows, " is out of range [0, ", m, "]");
  require(a.topk_ids.extent(0) == m && a.topk_ids.extent(1) == c.num_slots(), e_arg, "topk_ids: shape [", a.topk_ids.extent(0), ", ",
          a.topk_ids.extent(1), "], expected [", m, ", ", c.num_slots(), "]");
  require(a.topk_weights.extent(0) == m && a.topk_weights.extent(1) == c.num_slots(), e_arg, "topk_weights: shape [",
          a.topk_weights.extent(0), ", ", a.topk_weights.extent(1), "], expected [", m, ", ", c.num_slots(), "]");
  moe::detail::check_rows("topk_ids", a.topk_ids);
  moe::detail::check_rows("topk_weights", a.topk_weights);
  require(
      a.shared_weights.data_handle() == nullptr || (a.shared_weights.extent(0) == m && a.shared_weights.extent(1) == c.num_joint_shared),
      e_arg, "shared_weights: shape [", a.shared_weights.extent(0), ", ", a.shared_weights.extent(1), "], expected [", m, ", ",
      c.num_joint_shared, "]");
  require(c.selection != Selection::hash_table || a.token_ids != nullptr || m == 0, e_arg, "token_ids: null, hash routing needs token ids");
}

}  // namespace moe::routing
