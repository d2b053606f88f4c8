// SPDX-License-Identifier: Apache-2.0
// examples/moe/cmd_plan.cpp: `moe plan`: from measured expert loads to a placement with replicas, as a picture or as JSON.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <range/v3/algorithm/max_element.hpp>
#include <range/v3/algorithm/min_element.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/iota.hpp>
#include <range/v3/view/transform.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "examples/moe/commands.hpp"
#include "examples/moe/option_values.hpp"
#include "examples/moe/placement.hpp"
#include "moe/eplb/balancedness.hpp"
#include "moe/eplb/files.hpp"
#include "moe/eplb/propose.hpp"
#include "moe/eplb/rebalance.hpp"
#include "moe/eplb/transfer_plan.hpp"

namespace moe_tool {
namespace {

using moe::Error;
using moe::ErrorCode;
using moe::text;
using moe::eplb::ExpertMaps;
using moe::eplb::Table;
using moe::eplb::Topology;
using nlohmann::json;

struct PlanOptions {
  std::string load;
  std::string model;
  int replicas = 0;
  int groups = 1;
  int nodes = 1;
  int ranks = 1;
  int layer = -1;
  bool keep_slots = false;
  bool spread = false;
  bool json = false;
};

/// One plan: the maps at start and the proposed ones, with the rank loads under both.
struct Plan {
  Table<double> load;
  Topology asked;
  Topology topology;  // what the policy plans for
  moe::eplb::Policy policy;
  ExpertMaps before;
  ExpertMaps after;
  Table<double> loads_before;  // [layers, R]
  Table<double> loads_after;
  std::vector<int> moved_slots;  // [layers]
  std::vector<int> messages;     // [layers], expert transfers between ranks
  std::vector<int> rounds;       // [layers]
};

Plan make_plan(PlanOptions const& options) {
  Plan plan;
  plan.load = moe::eplb::read_load(options.load, options.model);
  if (options.layer >= plan.load.rows()) {
    throw Error(ErrorCode::argument, text("--layer ", options.layer, " is out of range [0, ", plan.load.rows(), ")"));
  }
  int const physical = plan.load.cols() + options.replicas;
  check_slots(plan.load.cols(), options.replicas, options.ranks);
  plan.asked = {.num_physical = physical, .num_groups = options.groups, .num_nodes = options.nodes, .num_ranks = options.ranks};
  std::tie(plan.topology, plan.policy) = moe::eplb::effective_topology(plan.asked, plan.load.cols());
  plan.before = ExpertMaps::initial(plan.load.rows(), plan.load.cols(), options.replicas);
  if (options.keep_slots || options.spread) {
    plan.after =
        moe::eplb::propose(plan.before, plan.load, plan.asked, {.keep_slots = options.keep_slots, .spread_replicas = options.spread}).maps;
  } else {
    plan.after = moe::eplb::rebalance(plan.load, plan.asked);
  }
  plan.loads_before = moe::eplb::rank_loads(plan.before, plan.load, options.ranks);
  plan.loads_after = moe::eplb::rank_loads(plan.after, plan.load, options.ranks);
  for (int layer = 0; layer < plan.load.rows(); ++layer) {
    auto const from = plan.before.physical_to_logical().row(layer);
    auto const to = plan.after.physical_to_logical().row(layer);
    auto const flows = moe::eplb::plan_flows(from, to, plan.load.cols(), options.ranks);
    int moved = 0;
    for (std::size_t slot = 0; slot < from.size(); ++slot) moved += from[slot] != to[slot] ? 1 : 0;
    plan.moved_slots.push_back(moved);
    plan.messages.push_back(static_cast<int>(flows.size()));
    plan.rounds.push_back(static_cast<int>(moe::eplb::schedule_rounds(flows, options.ranks).size()));
  }
  return plan;
}

/// Which of --groups and --nodes the plan ignores, and why; empty if none.
std::string ignored(Plan const& plan) {
  Topology const& asked = plan.asked;
  std::string out;
  auto const add = [&](auto const&... words) { out += (out.empty() ? "" : "; ") + text(words...); };
  bool const groups = plan.load.cols() % asked.num_groups == 0;
  if (!groups) {
    add("--groups ", asked.num_groups, " is ignored: the number of experts, ", plan.load.cols(), ", is not a multiple of it");
  }
  if (asked.num_ranks % asked.num_nodes != 0) {
    add("--nodes ", asked.num_nodes, " is ignored: --ranks ", asked.num_ranks, " is not a multiple of it; the plan is for 1 node");
  } else if (plan.topology.num_nodes != asked.num_nodes) {
    add("--nodes ", asked.num_nodes, " is ignored: ", groups ? text("--groups ", asked.num_groups) : "1 group",
        " is not a multiple of it; the plan is for 1 node, policy ", name(plan.policy));
  }
  return out;
}

template <class Value>
std::vector<Value> row(Table<Value> const& table, int r) {
  return {table.row(r).begin(), table.row(r).end()};
}
double layer_balance(Table<double> const& loads, int layer) { return moe::eplb::balancedness(loads.row(layer)); }

/// Field names and layout of the maps are those of the published load balancer's results.
json to_json(Plan const& plan, int only_layer) {
  auto const layers = only_layer < 0 ? ranges::views::iota(0, plan.load.rows()) : ranges::views::iota(only_layer, only_layer + 1);
  auto const per_layer = [&](auto&& make) { return json(layers | ranges::views::transform(make) | ranges::to<std::vector>()); };
  auto const& counts = plan.after.replica_count().flat();
  auto const widest = static_cast<std::size_t>(*ranges::max_element(counts));
  auto const side = [&](Table<double> const& loads) {
    return json{{"balancedness", moe::eplb::balancedness(loads)},
                {"balancedness_per_layer", per_layer([&](int l) { return layer_balance(loads, l); })},
                {"rank_loads", per_layer([&](int l) { return row(loads, l); })}};
  };
  auto const at = [](std::vector<int> const& values) { return [&values](int l) { return values[static_cast<std::size_t>(l)]; }; };
  json out{
      {"policy", name(plan.policy)},
      {"num_layers", plan.load.rows()},
      {"num_logical_experts", plan.load.cols()},
      {"num_redundant_experts", plan.after.num_redundant()},
      {"num_physical_experts", plan.after.num_physical()},
      {"num_groups", plan.topology.num_groups},
      {"num_nodes", plan.topology.num_nodes},
      {"num_ranks", plan.topology.num_ranks},
      {"balancedness_before", moe::eplb::balancedness(plan.loads_before)},
      {"balancedness_after", moe::eplb::balancedness(plan.loads_after)},
      {"before", side(plan.loads_before)},
      {"after", side(plan.loads_after)},
      {"physical_to_logical", per_layer([&](int l) { return row(plan.after.physical_to_logical(), l); })},
      {"logical_to_physical", per_layer([&](int l) {
         return ranges::views::iota(0, plan.load.cols()) | ranges::views::transform([&](int e) {
                  auto const slots = plan.after.replicas_of(l, e).first(widest);
                  return std::vector<std::int32_t>(slots.begin(), slots.end());
                }) |
                ranges::to<std::vector>();
       })},
      {"logical_count", per_layer([&](int l) { return row(plan.after.replica_count(), l); })},
      {"moved_slots", per_layer(at(plan.moved_slots))},
      {"expert_transfers", per_layer(at(plan.messages))},
      {"transfer_rounds", per_layer(at(plan.rounds))},
  };
  if (only_layer >= 0) out["layer"] = only_layer;
  if (std::string const note = ignored(plan); !note.empty()) out["note"] = note;
  return out;
}

std::string bar(double value, double full, int width) {
  int const filled = full > 0 ? static_cast<int>(std::lround(value / full * width)) : 0;
  return std::string(static_cast<std::size_t>(filled), '#') + std::string(static_cast<std::size_t>(width - filled), '.');
}

/// A rank's experts in order of physical id; replicated ones as id/copies.
std::string experts_of(Plan const& plan, int layer, int rank) {
  int const slots = plan.after.num_physical() / plan.topology.num_ranks;
  auto const held = plan.after.physical_to_logical().row(layer).subspan(static_cast<std::size_t>(rank) * static_cast<std::size_t>(slots),
                                                                        static_cast<std::size_t>(slots));
  std::string out;
  for (std::int32_t e : held) {
    int const copies = plan.after.replica_count()(layer, e);
    out += copies > 1 ? fmt::format(" {}/{}", e, copies) : fmt::format(" {}", e);
  }
  return out;
}

void print_layer(Plan const& plan, int layer) {
  constexpr int kWidth = 24;
  auto const before = row(plan.loads_before, layer);
  auto const after = row(plan.loads_after, layer);
  double const full = std::max(*ranges::max_element(before), *ranges::max_element(after));
  fmt::print("\nlayer {}: balancedness {:.3f} -> {:.3f}, {} of {} expert slots change, {} expert transfers in {} transfer rounds\n", layer,
             layer_balance(plan.loads_before, layer), layer_balance(plan.loads_after, layer),
             plan.moved_slots[static_cast<std::size_t>(layer)], plan.after.num_physical(), plan.messages[static_cast<std::size_t>(layer)],
             plan.rounds[static_cast<std::size_t>(layer)]);
  fmt::print("  rank  {:<{}}  {:<{}}  experts (id/copies), in order of physical id\n", "load before", kWidth + 9, "load after", kWidth + 9);
  int const ranks_per_node = plan.topology.num_ranks / plan.topology.num_nodes;
  for (int rank = 0; rank < plan.topology.num_ranks; ++rank) {
    if (plan.topology.num_nodes > 1 && rank % ranks_per_node == 0) fmt::print("  node {}\n", rank / ranks_per_node);
    auto const r = static_cast<std::size_t>(rank);
    fmt::print("  {:>4}  {} {:>8.6g}  {} {:>8.6g} {}\n", rank, bar(before[r], full, kWidth), before[r], bar(after[r], full, kWidth),
               after[r], experts_of(plan, layer, rank));
  }
}

void print(Plan const& plan, int only_layer) {
  fmt::print("{} layers, {} experts + {} replicas = {} expert slots on {} ranks ({} a rank); {} policy, {} groups, {} nodes\n",
             plan.load.rows(), plan.load.cols(), plan.after.num_redundant(), plan.after.num_physical(), plan.topology.num_ranks,
             plan.after.num_physical() / plan.topology.num_ranks, name(plan.policy), plan.topology.num_groups, plan.topology.num_nodes);
  if (std::string const note = ignored(plan); !note.empty()) fmt::print("note: {}\n", note);
  double const before = moe::eplb::balancedness(plan.loads_before);
  double const after = moe::eplb::balancedness(plan.loads_after);
  constexpr int kWidth = 50;
  fmt::print("balancedness (mean rank load / largest, over all layers; 1 is perfect)\n");
  fmt::print("  before {:.3f} {}\n  after  {:.3f} {}\n", before, bar(before, 1.0, kWidth), after, bar(after, 1.0, kWidth));
  for (int layer : ranges::views::iota(0, plan.load.rows())) {
    if (only_layer < 0 || only_layer == layer) print_layer(plan, layer);
  }
}

}  // namespace

void add_plan(CLI::App& app) {
  auto* plan = app.add_subcommand("plan", "Plan where experts and their replicas go, from measured loads");
  auto options = std::make_shared<PlanOptions>();
  plan->add_option(
          "--load", options->load,
          "JSON file of loads, [layers][experts]: the rows alone, an object with \"weight\" or \"load\", or saved load window sums")
      ->required()
      ->check(some_text("a file"));
  plan->add_option("--replicas", options->replicas, "Redundant experts X: experts + X physical experts in all")
      ->check(whole_number(0, 1 << 16));
  plan->add_option("--groups", options->groups, "Groups of the router; they stay on one node if they divide")
      ->check(whole_number(1, 1 << 20));
  plan->add_option("--nodes", options->nodes, "Nodes that the ranks lie on")->check(whole_number(1, 1 << 20));
  plan->add_option("--ranks", options->ranks, "Ranks of the expert-parallel group")->required()->check(whole_number(1, 1 << 20));
  plan->add_option("--model", options->model, "Which model of a file with several")->check(some_text("the name of a model"));
  plan->add_option("--layer", options->layer, "Print this layer only")->check(whole_number(0));
  plan->add_flag("--keep-slots", options->keep_slots,
                 "An expert that stays on its rank keeps its physical id: fewer weights move; a layer that would not gain keeps its map");
  plan->add_flag("--spread", options->spread,
                 "Put copies of one expert on different ranks where an exchange allows it; a layer that would not gain keeps its map");
  plan->add_flag("--json", options->json, "Print one JSON object instead of the picture");
  plan->callback([options] {
    require_one_rank("plan");
    Plan const made = make_plan(*options);
    if (options->json) {
      fmt::print("{}\n", to_json(made, options->layer).dump());
    } else {
      print(made, options->layer);
    }
  });
}

}  // namespace moe_tool
