// SPDX-License-Identifier: Apache-2.0
// eplb/move_elastic.hpp: moves the experts of a scaling operation between old, remaining and joining ranks.
#pragma once

#include <algorithm>
#include <chrono>

#include "moe/core/error.hpp"
#include "moe/eplb/elastic.hpp"
#include "moe/eplb/group.hpp"
#include "moe/eplb/rearrange.hpp"
#include "moe/eplb/weight_mover.hpp"

namespace moe::eplb {

/// Moves the experts of a scaling operation. Collective over the mover's communicator and over `group`, both of the plan's union ranks; the
/// mover's weights have L expert slots on each, those of joining ranks empty. After it, remaining and joining ranks hold what plan.maps
/// gives them; leaving ranks have only sent. E_ARG if mover and plan do not fit. If a rank fails in a layer, all throw: if it was the first
/// that moved, the old topology is intact; otherwise the group is lost, as after a commit.
template <Communicator Comm, BalancingGroup Group>
RearrangeReport move_elastic(WeightMover<Comm>& mover, ElasticPlan const& plan, Group& group, Stream<typename Comm::Space> stream = {}) {
  auto const start = std::chrono::steady_clock::now();
  MoveStats const before = mover.stats();
  int changed = 0;
  detail::together(group, "scaling", [&] {
    if (mover.num_layers() != plan.old_map.rows() || mover.num_ranks() != plan.num_union_ranks ||
        mover.num_ranks() * mover.slots_per_rank() != plan.old_map.cols()) {
      throw Error(ErrorCode::argument, text("scaling of ", plan.old_map.rows(), " layers and ", plan.old_map.cols(), " expert slots on ",
                                            plan.num_union_ranks, " ranks; weights of ", mover.num_layers(), " layers, ", mover.num_ranks(),
                                            " ranks and ", mover.slots_per_rank(), " expert slots a rank"));
    }
  });
  check_same_maps(group.all_gather(plan.maps.hash()));
  for (int layer = 0; layer < plan.old_map.rows(); ++layer) {
    if (std::ranges::equal(plan.old_map.row(layer), plan.new_map.row(layer))) continue;
    detail::move_layer(mover, layer, plan.old_map.row(layer), plan.new_map.row(layer), group, stream);
    ++changed;
  }
  RearrangeReport report = detail::report_since(before, mover.stats(), start);
  report.layers_changed = changed;
  return report;
}

}  // namespace moe::eplb
