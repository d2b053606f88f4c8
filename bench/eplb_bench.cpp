// SPDX-License-Identifier: Apache-2.0
// bench/eplb_bench.cpp: time to plan placements and transfers on one core. The goal: 61 layers x 256 experts + 32 replicas on 32 ranks in
// 50 ms.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "bench/checked.hpp"
#include "moe/eplb/propose.hpp"
#include "moe/eplb/transfer_plan.hpp"

namespace {

using moe::eplb::Arithmetic;
using moe::eplb::ExpertMaps;
using moe::eplb::Table;
using moe::eplb::Topology;

Table<double> lognormal_load(int layers, int experts) {
  std::mt19937 random(1);
  std::lognormal_distribution<double> tokens(6.0, 1.0);
  Table<double> load(layers, experts);
  for (double& v : load.flat()) v = std::floor(tokens(random));
  return load;
}

// Arguments: layers, experts, redundant, groups, nodes, ranks.
Topology topology_of(benchmark::State const& state) {
  return {.num_physical = static_cast<int>(state.range(1) + state.range(2)),
          .num_groups = static_cast<int>(state.range(3)),
          .num_nodes = static_cast<int>(state.range(4)),
          .num_ranks = static_cast<int>(state.range(5))};
}
Table<double> load_of(benchmark::State const& state) {
  return lognormal_load(static_cast<int>(state.range(0)), static_cast<int>(state.range(1)));
}

template <Arithmetic A>
void rebalance(benchmark::State& state) {
  Table<double> const load = load_of(state);
  Topology const topology = topology_of(state);
  ExpertMaps const maps = moe::eplb::rebalance(load, topology, A);
  double const before = balancedness(
      rank_loads(ExpertMaps::initial(load.rows(), load.cols(), topology.num_physical - load.cols()), load, topology.num_ranks));
  double const after = balancedness(rank_loads(maps, load, topology.num_ranks));
  if (after <= before) return moe_bench::skip_wrong(state, "the plan is no better than the initial map");
  for ([[maybe_unused]] auto _ : state) benchmark::DoNotOptimize(moe::eplb::rebalance(load, topology, A));
  state.counters["balancedness_before"] = before;
  state.counters["balancedness_after"] = after;
}

/// Whether the flows and every rank's plan turn one layer's old map into the new one.
bool reaches(std::span<moe::eplb::Flow const> flows, std::span<std::int32_t const> from, std::span<std::int32_t const> to, int ranks) {
  std::vector<std::int32_t> slots(from.begin(), from.end());
  std::vector<std::int32_t> buffer(from.size(), -1);  // the spare expert slots of all ranks
  for (int rank = 0; rank < ranks; ++rank) {
    auto const plan = moe::eplb::plan_rank(flows, from, to, ranks, rank);
    for (auto const& copy : plan.local_copies) buffer[std::size_t(copy.destination_slot)] = from[std::size_t(copy.source_slot)];
    for (auto const& flow : plan.receives) buffer[std::size_t(flow.destination_slot)] = from[std::size_t(flow.source_slot)];
    for (auto const& copy : plan.duplicates) buffer[std::size_t(copy.destination_slot)] = buffer[std::size_t(copy.source_slot)];
    for (std::int32_t const slot : plan.commits) slots[std::size_t(slot)] = buffer[std::size_t(slot)];
  }
  return std::equal(slots.begin(), slots.end(), to.begin(), to.end());
}

// The engine's planning at a rearrangement: new maps that keep expert slots, and every layer's flows in transfer rounds.
void propose_and_plan_transfers(benchmark::State& state) {
  Table<double> const load = load_of(state);
  Topology const topology = topology_of(state);
  ExpertMaps const current = ExpertMaps::initial(load.rows(), load.cols(), topology.num_physical - load.cols());
  auto const checked = moe::eplb::propose(current, load, topology);
  for (int layer : checked.changed_layers) {
    auto const from = current.physical_to_logical().row(layer), to = checked.maps.physical_to_logical().row(layer);
    if (!reaches(moe::eplb::plan_flows(from, to, load.cols(), topology.num_ranks), from, to, topology.num_ranks)) {
      return moe_bench::skip_wrong(state, "the flows do not lead to the proposed map of layer " + std::to_string(layer));
    }
  }
  if (checked.changed_layers.empty()) return moe_bench::skip_wrong(state, "nothing is proposed");
  std::size_t flows = 0;
  std::size_t rounds = 0;
  for ([[maybe_unused]] auto _ : state) {
    flows = rounds = 0;
    auto const proposal = moe::eplb::propose(current, load, topology);
    for (int layer : proposal.changed_layers) {
      auto const planned = moe::eplb::plan_flows(current.physical_to_logical().row(layer), proposal.maps.physical_to_logical().row(layer),
                                                 load.cols(), topology.num_ranks);
      flows += planned.size();
      rounds += moe::eplb::schedule_rounds(planned, topology.num_ranks).size();
    }
    benchmark::DoNotOptimize(flows);
  }
  state.counters["flows"] = static_cast<double>(flows);
  state.counters["rounds"] = static_cast<double>(rounds);
}

void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"layers", "experts", "redundant", "groups", "nodes", "ranks"})
      ->Args({61, 256, 32, 8, 4, 32})
      ->Args({61, 256, 32, 1, 1, 32})
      ->Args({48, 128, 16, 1, 1, 16})
      ->Args({60, 384, 64, 1, 1, 64})
      ->Unit(benchmark::kMillisecond);
}

BENCHMARK_TEMPLATE(rebalance, Arithmetic::float32)->Name("rebalance/float32")->Apply(sizes);
BENCHMARK_TEMPLATE(rebalance, Arithmetic::float64)->Name("rebalance/float64")->Apply(sizes);
BENCHMARK(propose_and_plan_transfers)->Apply(sizes);

}  // namespace

int main(int argc, char** argv) {
  if (!moe_bench::initialize(argc, argv)) return moe_bench::kBadArguments;
  return moe_bench::run_benchmarks();
}
