// SPDX-License-Identifier: Apache-2.0
// routing/row/route_args.hpp: what every router's select() takes.
#pragma once

#include <cstdint>

#include "moe/core/array.hpp"

namespace moe::routing {

/// Counters of routing. Owned by the caller; a null pointer turns counting off.
struct RouteCounters {
  std::int64_t degenerate_rows = 0;  ///< rows for which a router's select() could choose no expert
  std::int64_t invalid_slots = 0;    ///< CUDA space: slots of the caller's routing with an invalid id or weight (caller_routing.hpp)
};

/// One batch to route. L: element of the logits (float, bf16 or f16). All arrays lie in the space that the router runs in.
template <class L>
struct RouteArgs {
  Rows<L const> logits;                     ///< [M, num_logits]
  std::int64_t num_valid_rows = 0;          ///< rows at or past it are padding: id -1, weight 0, not counted
  std::int64_t const* token_ids = nullptr;  ///< [M], for hash routing; null otherwise
  Rows<std::int32_t> topk_ids;              ///< [M, num_slots] out, logical ids in selection order
  Rows<float> topk_weights;                 ///< [M, num_slots] out
  RouteCounters* counters = nullptr;        ///< or null
  Rows<float> shared_weights = {};          ///< [M, num_joint_shared] out: weights of jointly normalised shared experts; or no rows
  /// Rows of each sequence; the call holds one sequence after another. Only a router with an expert_capacity reads it. 0: not known.
  std::int64_t sequence_length = 0;
};

}  // namespace moe::routing
