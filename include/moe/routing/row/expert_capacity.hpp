// SPDX-License-Identifier: Apache-2.0
// routing/row/expert_capacity.hpp: the capacity of Switch Transformers: an expert takes the first tokens of a sequence that choose it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moe/core/array.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/types.hpp"
#include "moe/routing/row/route_args.hpp"
#include "moe/routing/row/router_config.hpp"
#include "moe/routing/row/validate.hpp"

namespace moe::routing {

/// Whether an expert could get more tokens of one sequence than it takes. E_ARG if only the length of a sequence can tell and is not known.
template <class L>
bool capacity_may_bind(RouterConfig const& c, RouteArgs<L> const& a) {
  using detail::require;
  require(a.sequence_length >= 0, ErrorCode::argument, "sequence_length: ", a.sequence_length, " is below 0");
  if (c.expert_capacity == 0 || a.num_valid_rows <= c.expert_capacity) return false;
  require(a.sequence_length > 0, ErrorCode::argument, "sequence_length: not given. Of ", a.num_valid_rows,
          " rows an expert takes at most expert_capacity ", c.expert_capacity,
          " of each sequence. Set ForwardOptions::sequence_length to the rows of one sequence");
  return a.sequence_length > c.expert_capacity;
}

/// E_ARG, E_UNSUPPORTED unless tokens get the experts of an uncut call where one of `rows` rows is cut at the multiples of `at` and each
/// piece is routed alone: an expert's capacity is counted over a whole sequence.
inline void check_cut(RouterConfig const& c, std::int64_t rows, std::int64_t at, std::int64_t sequence_length) {
  using detail::require;
  if (c.expert_capacity == 0 || rows <= c.expert_capacity || at <= 0 || at >= rows) return;
  require(sequence_length > 0, ErrorCode::argument, "sequence_length: not given. Of ", rows, " rows, cut at row ", at,
          ", an expert takes at most expert_capacity ", c.expert_capacity, " of each sequence");
  require(sequence_length <= c.expert_capacity || at % sequence_length == 0, ErrorCode::unsupported, "expert_capacity: ", c.expert_capacity,
          " is counted over a sequence of ", sequence_length, " rows, and the batch is cut at row ", at);
}

/// The same for a router object, which may have no capacity.
template <class Router>
void check_cut(Router const& router, std::int64_t rows, std::int64_t at, std::int64_t sequence_length) {
  if constexpr (facts::resolves<Router>()) check_cut(router.resolved(), rows, at, sequence_length);
}

/// Takes the expert from each token of a sequence that comes after expert_capacity others of it with the same choice, as transformers does.
/// Host memory. Allocates nothing: counts by comparing.
template <class L>
void drop_overflow(RouterConfig const& c, RouteArgs<L> const& a) {
  std::int64_t const valid = std::min(a.num_valid_rows, a.logits.extent(0));
  for (std::int64_t t = valid - 1; t >= 0; --t) {  // downwards: the choices of earlier tokens are still there
    std::int32_t const id = a.topk_ids(t, 0);
    std::int64_t before = 0;
    for (std::int64_t s = t / a.sequence_length * a.sequence_length; s < t && before < c.expert_capacity; ++s) {
      before += a.topk_ids(s, 0) == id ? 1 : 0;
    }
    if (before >= c.expert_capacity) {
      a.topk_ids(t, 0) = kNoExpert;
      a.topk_weights(t, 0) = 0.0F;
    }
  }
}

}  // namespace moe::routing
