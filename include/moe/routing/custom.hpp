// SPDX-License-Identifier: Apache-2.0
// routing/custom.hpp: a caller's own routing function as a router, with its results checked.
#pragma once

#include <cstdint>
#include <utility>

#include "moe/routing/row/route_args.hpp"
#include "moe/routing/row/route_row.hpp"
#include "moe/routing/row/validate.hpp"

namespace moe::routing {

/// Routes by `f(logits [M, E], k, renormalize, ids [M, k] out, weights [M, k] out)`, a host function over all valid rows. A function that
/// needs the hidden states captures their view. Every id must be -1 or in [0, E) and unique in its row, every weight finite: else E_ARG.
template <class F>
class CustomRouter {
 public:
  static constexpr char const* kName = "custom";
  static constexpr bool kWeightOnInput = false;
  struct Params {
    int num_experts = 0;
    int topk = 0;
    bool renormalize = false;
    F function;
  };
  /// Throws E_CONFIG; E_ARG if the function can be empty and is.
  explicit CustomRouter(Params const& p) : p_(p) {
    config_.num_experts = p.num_experts;
    config_.topk = p.topk;
    validate(config_);
    if constexpr (requires { p.function.operator bool(); }) {  // std::function
      detail::require(p.function.operator bool(), ErrorCode::argument, "function: empty");
    }
  }

  int num_experts() const { return p_.num_experts; }
  int topk() const { return p_.topk; }
  int num_logits() const { return p_.num_experts; }
  int num_slots() const { return p_.topk; }

  template <class L>
  void select(RouteArgs<L> const& a) const {
    check_args(config_, a);
    std::int64_t const valid = a.num_valid_rows;
    p_.function(make_strided_rows(a.logits.data_handle(), valid, num_logits(), a.logits.stride(0)), p_.topk, p_.renormalize,
                make_strided_rows(a.topk_ids.data_handle(), valid, p_.topk, a.topk_ids.stride(0)),
                make_strided_rows(a.topk_weights.data_handle(), valid, p_.topk, a.topk_weights.stride(0)));
    for (std::int64_t t = 0; t < a.logits.extent(0); ++t) {
      std::int32_t* const ids = row_ptr(a.topk_ids, t);
      float* const weights = row_ptr(a.topk_weights, t);
      if (t >= valid) {
        pad_row(config_, ids, weights);
        continue;
      }
      for (int j = 0; j < p_.topk; ++j) check_slot(t, j, ids, weights[j]);
    }
  }

 private:
  void check_slot(std::int64_t t, int j, std::int32_t const* ids, float weight) const {
    using detail::require;
    require(ids[j] >= kNoExpert && ids[j] < p_.num_experts, ErrorCode::argument, "topk_ids[", t, ", ", j, "]: ", ids[j],
            " is out of range [-1, ", p_.num_experts, ")");
    require(weight - weight == 0.0F, ErrorCode::argument, "topk_weights[", t, ", ", j, "]: ", weight, " is not finite");
    for (int i = 0; i < j; ++i) {
      require(ids[j] == kNoExpert || ids[i] != ids[j], ErrorCode::argument, "topk_ids[", t, ", ", j, "]: ", ids[j], " occurs twice");
    }
  }

  Params p_;
  RouterConfig config_;
};

}  // namespace moe::routing
