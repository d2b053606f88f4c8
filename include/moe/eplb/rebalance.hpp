// SPDX-License-Identifier: Apache-2.0
// eplb/rebalance.hpp: from expert loads to a placement: balanced packing, replication, the hierarchical and the global policy.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/eplb/maps.hpp"

namespace moe::eplb {

/// The physical experts, groups, nodes and ranks that the experts are placed on.
struct Topology {
  int num_physical = 0;  ///< P, physical experts over all ranks; P % num_ranks = 0
  int num_groups = 1;    ///< G, groups of the router; 1 if they do not divide the experts
  int num_nodes = 1;     ///< taken as 1 if they do not divide the ranks
  int num_ranks = 1;     ///< R
};

/// Precision in which loads are added, divided and compared. Both give the reference placements integer for integer.
enum class Arithmetic : std::uint8_t {
  float32,  ///< what the published algorithm uses, ties in rounding included
  float64,  ///< keeps loads above 2^24 apart: the default
};

constexpr std::string_view name(Arithmetic arithmetic) { return arithmetic == Arithmetic::float32 ? "float32" : "float64"; }

/// Which packing was used.
enum class Policy : std::uint8_t { hierarchical, global };
constexpr std::string_view name(Policy policy) { return policy == Policy::hierarchical ? "hierarchical" : "global"; }

/// n items assigned to packs: pack[i] and the item's position in it.
struct Packing {
  std::vector<std::int32_t> pack;
  std::vector<std::int32_t> position;
};

/// n experts copied to q replicas: expert[i] and which copy of it replica i is; count[e] copies in all.
struct Replication {
  std::vector<std::int32_t> expert;
  std::vector<std::int32_t> copy;
  std::vector<std::int32_t> count;
};

namespace detail {
/// Index types differ between spans and the field's int32 ids; this is the one place that converts.
template <class Container>
decltype(auto) at(Container&& c, std::int32_t i) {
  return c[static_cast<std::size_t>(i)];
}
inline std::vector<std::int32_t> indices(std::size_t n) {
  std::vector<std::int32_t> out(n);
  std::iota(out.begin(), out.end(), 0);
  return out;
}
/// f of each element. Not by std::views: clang 14 does not compile those of libstdc++ 12.
template <class Range, class Function>
auto transformed(Range const& range, Function f) {
  std::vector<std::remove_cvref_t<decltype(f(*range.begin()))>> out(range.size());
  std::ranges::transform(range, out.begin(), f);
  return out;
}
}  // namespace detail

/// n weights into num_packs packs of n / num_packs items each: heaviest first (equals: lower index first), each into the lightest
/// pack that has room (equals: lower pack). n % num_packs = 0.
template <class Real>
Packing balanced_packing(std::span<Real const> weight, int num_packs) {
  using detail::at;
  auto const room = static_cast<std::int32_t>(weight.size()) / num_packs;
  Packing out{std::vector<std::int32_t>(weight.size()), std::vector<std::int32_t>(weight.size(), 0)};
  if (room == 1) {
    out.pack = detail::indices(weight.size());
    return out;
  }
  auto heaviest_first = detail::indices(weight.size());
  std::ranges::stable_sort(heaviest_first, std::greater<>{}, [&](std::int32_t i) { return at(weight, i); });

  std::vector<Real> total(static_cast<std::size_t>(num_packs), Real{0});
  std::vector<std::int32_t> filled(static_cast<std::size_t>(num_packs), 0);
  for (std::int32_t i : heaviest_first) {
    std::int32_t lightest = -1;
    for (std::int32_t p = 0; p < num_packs; ++p) {
      bool const has_room = at(filled, p) < room;
      if (has_room && (lightest < 0 || at(total, p) < at(total, lightest))) lightest = p;
    }
    at(out.pack, i) = lightest;
    at(out.position, i) = at(filled, lightest)++;
    at(total, lightest) += at(weight, i);
  }
  return out;
}

/// One copy of each expert, then each further copy to the expert of the largest load per copy (equals: lowest). num_replicas >= n.
template <class Real>
Replication replicate(std::span<Real const> weight, int num_replicas) {
  using detail::at;
  Replication out;
  out.expert = detail::indices(weight.size());
  out.copy.assign(weight.size(), 0);
  out.count.assign(weight.size(), 1);
  std::vector<Real> per_copy(weight.begin(), weight.end());
  while (static_cast<int>(out.expert.size()) < num_replicas) {
    auto const hottest = static_cast<std::int32_t>(std::ranges::max_element(per_copy) - per_copy.begin());
    out.expert.push_back(hottest);
    out.copy.push_back(at(out.count, hottest)++);
    at(per_copy, hottest) = at(weight, hottest) / static_cast<Real>(at(out.count, hottest));
  }
  return out;
}

namespace detail {

/// One layer: the logical expert and the replica index of each physical expert.
struct LayerMap {
  std::span<std::int32_t> physical_to_logical;  // [P]
  std::span<std::int32_t> replica;              // [P]
};

template <class Real>
void place_layer(std::span<double const> load, Topology const& topology, LayerMap out) {
  auto const num_logical = static_cast<std::int32_t>(load.size());
  std::int32_t const group_size = num_logical / topology.num_groups;
  std::int32_t const groups_per_node = topology.num_groups / topology.num_nodes;
  std::int32_t const logical_per_node = num_logical / topology.num_nodes;
  std::int32_t const slots_per_node = topology.num_physical / topology.num_nodes;
  std::int32_t const slots_per_rank = topology.num_physical / topology.num_ranks;
  auto const weight = transformed(load, [](double w) { return static_cast<Real>(w); });

  // 1: whole groups to nodes; experts are renumbered node by node.
  auto const group_weight = transformed(indices(static_cast<std::size_t>(topology.num_groups)), [&](std::int32_t g) {
    auto const first = weight.begin() + static_cast<std::ptrdiff_t>(g) * group_size;
    return std::accumulate(first, first + group_size, Real{0});
  });
  Packing const groups = balanced_packing(std::span<Real const>(group_weight), topology.num_nodes);
  std::vector<std::int32_t> logical_of(load.size());  // node-major number → logical expert
  for (std::int32_t e = 0; e < num_logical; ++e) {
    std::int32_t const g = e / group_size;
    at(logical_of, (at(groups.pack, g) * groups_per_node + at(groups.position, g)) * group_size + e % group_size) = e;
  }

  for (std::int32_t node = 0; node < topology.num_nodes; ++node) {
    auto const mine = std::span<std::int32_t const>(logical_of)
                          .subspan(static_cast<std::size_t>(node) * static_cast<std::size_t>(logical_per_node),
                                   static_cast<std::size_t>(logical_per_node));
    // 2: the node's spare expert slots go to its hottest experts.
    auto const node_weight = transformed(mine, [&](std::int32_t e) { return at(weight, e); });
    Replication const copies = replicate(std::span<Real const>(node_weight), slots_per_node);
    // 3: copies to the node's ranks.
    auto const copy_weight =
        transformed(copies.expert, [&](std::int32_t e) { return at(node_weight, e) / static_cast<Real>(at(copies.count, e)); });
    Packing const ranks = balanced_packing(std::span<Real const>(copy_weight), topology.num_ranks / topology.num_nodes);
    for (std::int32_t i : indices(copies.expert.size())) {
      std::int32_t const slot = node * slots_per_node + at(ranks.pack, i) * slots_per_rank + at(ranks.position, i);
      at(out.physical_to_logical, slot) = at(mine, at(copies.expert, i));
      at(out.replica, slot) = at(copies.copy, i);
    }
  }
}

}  // namespace detail

/// The topology as the algorithm uses it, and its policy: nodes or groups that do not divide count as one; groups that do not
/// divide over the nodes give the global policy. E_ARG: P % R != 0, P < E, or a size below 1.
inline std::pair<Topology, Policy> effective_topology(Topology topology, int num_logical) {
  auto const at_least_one = [](std::string_view field, int value) {
    if (value < 1) throw Error(ErrorCode::argument, text(field, " must be at least 1, is ", value));
  };
  at_least_one("num_logical", num_logical);
  at_least_one("num_ranks", topology.num_ranks);
  at_least_one("num_nodes", topology.num_nodes);
  at_least_one("num_groups", topology.num_groups);
  if (topology.num_physical < num_logical) {
    throw Error(ErrorCode::argument,
                text("num_physical: ", topology.num_physical, " is below ", num_logical, ", the number of logical experts"));
  }
  if (topology.num_physical % topology.num_ranks != 0) {
    throw Error(ErrorCode::argument, text("num_physical: ", topology.num_physical, " is not a multiple of num_ranks ", topology.num_ranks));
  }
  if (topology.num_ranks % topology.num_nodes != 0) topology.num_nodes = 1;
  if (num_logical % topology.num_groups != 0) topology.num_groups = 1;
  if (topology.num_groups % topology.num_nodes == 0) return {topology, Policy::hierarchical};
  topology.num_groups = topology.num_nodes = 1;
  return {topology, Policy::global};
}

/// load [layers, E] (tokens) → maps of P physical experts. A pure function of its arguments: equal on every rank and platform. Layers are
/// independent. E_ARG: as effective_topology, or a load that is negative, not finite or above the largest value of `arithmetic` / E, so
/// that no sum overflows (names layer and expert).
/// Source: the published hierarchical load balancing for expert parallelism (stable sort, lower index first among equals).
inline ExpertMaps rebalance(Table<double> const& load, Topology const& requested, Arithmetic arithmetic = Arithmetic::float64) {
  Topology const topology = effective_topology(requested, load.cols()).first;
  double const largest = arithmetic == Arithmetic::float32 ? double{std::numeric_limits<float>::max()} : std::numeric_limits<double>::max();
  double const bound = largest / load.cols();
  for (int layer = 0; layer < load.rows(); ++layer) {
    for (int e = 0; e < load.cols(); ++e) {
      if (!std::isfinite(load(layer, e)) || load(layer, e) < 0) {
        throw Error(ErrorCode::argument,
                    text("load of expert ", e, " in layer ", layer, " must be finite and at least 0, is ", load(layer, e)));
      }
      if (load(layer, e) > bound) {
        throw Error(ErrorCode::argument, text("load of expert ", e, " in layer ", layer, " must be at most ", bound, " (", name(arithmetic),
                                              ", ", load.cols(), " experts), is ", load(layer, e)));
      }
    }
  }
  Table<std::int32_t> physical_to_logical(load.rows(), topology.num_physical);
  Table<std::int32_t> replica(load.rows(), topology.num_physical);
  for (int layer = 0; layer < load.rows(); ++layer) {
    detail::LayerMap const out{physical_to_logical.row(layer), replica.row(layer)};
    if (arithmetic == Arithmetic::float32) {
      detail::place_layer<float>(load.row(layer), topology, out);
    } else {
      detail::place_layer<double>(load.row(layer), topology, out);
    }
  }
  return ExpertMaps(std::move(physical_to_logical), replica, load.cols());
}

}  // namespace moe::eplb
