// SPDX-License-Identifier: Apache-2.0
// examples/moe/serve_sim/simulated_ranks.hpp: the loads of ranks that one process simulates: routing, replicas and balancing, no layer.
#pragma once

#include <cstdint>
#include <vector>

#include "examples/moe/serve_sim/serve_sim.hpp"
#include "moe/eplb/balancer.hpp"
#include "moe/eplb/map_tables.hpp"

namespace moe_tool::serve_sim {

class SimulatedRanks : public Ranks {
 public:
  /// E_CONFIG if the expert slots do not divide over the ranks.
  SimulatedRanks(Options const& options, Routing const& routing);
  int size() const override { return ranks_; }
  Step step(std::int64_t number) override;
  moe::eplb::ExpertMaps const& maps() const override { return balancer_.maps(0); }

 private:
  Options options_;
  Routing const& routing_;
  int ranks_;
  moe::eplb::Balancer balancer_;
  moe::eplb::MapTables<moe::space::host> tables_;
  std::vector<std::int32_t> ids_;  // [tokens, topk] of one rank
};

/// --eplb-interval, or half of the steps.
moe::eplb::BalancerOptions balancer_options(Options const& options);

}  // namespace moe_tool::serve_sim
