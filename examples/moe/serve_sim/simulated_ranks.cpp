// SPDX-License-Identifier: Apache-2.0
// examples/moe/serve_sim/simulated_ranks.cpp: counts the slots of every simulated rank and rebalances as the engine would.
#include "examples/moe/serve_sim/simulated_ranks.hpp"

#include <algorithm>
#include <range/v3/numeric/accumulate.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/chunk.hpp>
#include <range/v3/view/iota.hpp>
#include <range/v3/view/transform.hpp>

#include "examples/moe/placement.hpp"
#include "moe/routing/expert_mapping.hpp"

namespace moe_tool::serve_sim {

using moe::eplb::ExpertMaps;

moe::eplb::BalancerOptions balancer_options(Options const& o) {
  auto const half = static_cast<int>(std::min<std::int64_t>(o.steps / 2 + 1, 1 << 30));
  return {.window = o.window, .step_interval = o.interval > 0 ? o.interval : half, .log_interval = 1, .never_rearrange = o.eplb == "off"};
}

namespace {
ExpertMaps first_maps(Options const& o, Routing const& routing, int ranks) {
  check_slots(routing.num_experts(), o.replicas, ranks);
  return ExpertMaps::initial(1, routing.num_experts(), o.replicas);
}
}  // namespace

SimulatedRanks::SimulatedRanks(Options const& o, Routing const& routing)
    : options_(o),
      routing_(routing),
      ranks_(o.ranks > 0 ? o.ranks : 8),
      balancer_(balancer_options(o)),
      tables_(first_maps(o, routing, ranks_)),
      ids_(static_cast<std::size_t>(o.tokens * routing.topk())) {
  balancer_.add_model("main", first_maps(o, routing, ranks_), ranks_);
}

Step SimulatedRanks::step(std::int64_t number) {
  auto& pass = balancer_.load_pass(0);
  int const k = routing_.topk();
  for (int rank = 0; rank < ranks_; ++rank) {
    routing_.fill(number, rank * options_.tokens, options_.tokens, ranks_ * options_.tokens, ids_.data());
    moe::routing::ExpertMapping const mapping = tables_.mapping(0, rank, ranks_);
    for (std::int64_t t = 0; t < options_.tokens; ++t) {
      for (int j = 0; j < k; ++j) {
        std::int32_t const slot = moe::routing::map_expert(mapping, ids_[static_cast<std::size_t>(t * k + j)], t, j, k);
        if (slot >= 0) ++pass(0, slot);
      }
    }
  }
  Step out;
  out.rank_slots = pass.row(0) | ranges::views::chunk(maps().num_physical() / ranks_) |
                   ranges::views::transform([](auto slots) { return ranges::accumulate(slots, std::int64_t{0}); }) |
                   ranges::to<std::vector>;
  moe::eplb::SelfGroup group;
  if (balancer_.step({}, group).rearrange) {
    ExpertMaps const next = balancer_.propose(0, {.num_physical = maps().num_physical(), .num_ranks = ranks_}, group).maps;
    balancer_.commit(0, next);
    tables_.publish(0, next);
    out.rebalanced = true;
  }
  return out;
}

}  // namespace moe_tool::serve_sim
