// SPDX-License-Identifier: Apache-2.0
// routing/pass_logits.hpp: for experts that route inside: every expert with its logit instead of a top-k.
#pragma once

#include <cstdint>

#include "moe/core/array.hpp"
#include "moe/core/space.hpp"
#include "moe/core/types.hpp"
#include "moe/routing/row/route_args.hpp"

namespace moe::routing {

/// Slot (t, j): expert j with its logit, or no expert in a row at or past num_valid_rows.
template <class L>
MOE_HD void pass_logit(RouteArgs<L> const& a, std::int64_t t, std::int64_t j) {
  bool const valid = t < a.num_valid_rows;
  a.topk_ids(t, j) = valid ? static_cast<std::int32_t>(j) : kNoExpert;
  a.topk_weights(t, j) = valid ? to_float(a.logits(t, j)) : 0.0F;
}

/// All slots of a batch. topk_ids, topk_weights [M, num_logits].
template <class L>
void pass_logits(RouteArgs<L> const& a, HostStream) {
  for (std::int64_t t = 0; t < a.logits.extent(0); ++t) {
    for (std::int64_t j = 0; j < a.logits.extent(1); ++j) pass_logit(a, t, j);
  }
}
/// The same on the device: one launch, capturable. Defined in routing/device/pass_logits.cuh.
template <class L>
void pass_logits(RouteArgs<L> const& a, Stream<space::cuda> stream);

}  // namespace moe::routing
