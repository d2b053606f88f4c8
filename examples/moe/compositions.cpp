// SPDX-License-Identifier: Apache-2.0
// examples/moe/compositions.cpp: the table of compositions, from the registry's lists, the rules, and what this program instantiates.
#include "examples/moe/compositions.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "examples/moe/cuda/instances.hpp"
#include "examples/moe/job.hpp"
#include "examples/moe/policy_lists.hpp"
#include "examples/moe/rule_check.hpp"
#include "moe/models/policy_table.hpp"
#include "moe/models/registry.hpp"

namespace moe_tool {
namespace {

namespace registry = moe::registry;
using moe::text;

// ---- One composition, as a constant.

/// What is said of a composition that the rules allow and this program leaves out.
enum class Missing : std::uint8_t { nothing, host_instance, further_scheme, own_program, component };

struct Cell {
  char const* refused = nullptr;
  Runner run = nullptr;
  Missing missing = Missing::nothing;
};

template <class List>
struct FirstSentence;
template <class... Verdicts>
struct FirstSentence<std::tuple<Verdicts...>> {
  static constexpr char const* value = [] {
    char const* sentence = nullptr;
    (void)((Verdicts::kHolds || (sentence = Verdicts::kSentence, false)) && ...);
    return sentence;
  }();
};

template <class Type, class List>
inline constexpr bool kIsIn = false;
template <class Type, class... Types>
inline constexpr bool kIsIn<Type, Pack<Types...>> = (std::is_same_v<Type, Types> || ...);
using OverComm = decltype(detail::pack_of(registry::host_backends));
using Samples = decltype(detail::pack_of(registry::sample_quantizations));
using Further = decltype(detail::pack_of(registry::further_quantizations));
using SampleBackends = decltype(detail::pack_of(registry::sample_backends));

template <class Quant, class Backend, class Experts>
constexpr Cell host_cell() {
  constexpr bool kInside = moe::facts::routes_inside<Experts>();
  if constexpr (kIsIn<Quant, Further>) {
    if constexpr (kIsIn<Backend, SampleBackends> && !kInside) {
      return {.run = &run_sample<Quant>};
    } else {
      return {.missing = Missing::further_scheme};
    }
  } else if constexpr (kIsIn<Backend, OverComm> && !kInside) {
    return {.run = &run_host<Quant>};
  } else if constexpr (!kIsIn<Quant, Samples>) {
    return {.missing = Missing::host_instance};
  } else if constexpr (kInside) {
    return {.run = &run_inside<Quant>};
  } else {
    return {.run = &run_windows<Quant, Backend::kFormat>};
  }
}

template <class Quant, class Backend, class Experts>
constexpr Cell cuda_cell() {
  constexpr Needs needs = instance_needs<Quant, Backend, Experts>();
  if constexpr (needs == Needs::own_program) {
    return {.missing = Missing::own_program};
  } else if constexpr (kHas[static_cast<std::size_t>(needs)]) {
    return {.run = cuda_runner<Quant, Backend, Experts>()};
  } else {
    return {.missing = Missing::component};
  }
}

template <class Quant, class Backend, class Experts>
constexpr Cell make_cell() {
  if constexpr (!std::is_same_v<typename Backend::Space, typename Experts::Space>) {
    return {.refused = moe::rules::SameSpace::kSentence};  // the first rule: no need to check the others
  } else {
    using Layer = registry::LayerFor<Backend, Experts>;
    // Of moe::Composition only the rules: that the policies have the members of their contracts is asserted once for each.
    constexpr char const* kRefused =
        FirstSentence<typename moe::detail::Verdicts<Layer, moe::routing::AnyRouter, Quant, Backend, Experts>::type>::value;
    if constexpr (kRefused != nullptr) {
      return {.refused = kRefused};
    } else if constexpr (std::is_same_v<typename Backend::Space, moe::space::host>) {
      return host_cell<Quant, Backend, Experts>();
    } else {
      return cuda_cell<Quant, Backend, Experts>();
    }
  }
}

template <class... Types>
constexpr bool are_quantizations(Pack<Types...>) {
  return (moe::Quantization<Types> && ...);
}
template <class... Types>
constexpr bool are_backends(Pack<Types...>) {
  return (moe::PrepareAndFinalize<Types> && ...);
}
template <class... Types>
constexpr bool are_experts(Pack<Types...>) {
  return (moe::Experts<Types> && ...);
}
static_assert(are_quantizations(Quantizations()) && are_backends(Backends()) && are_experts(ExpertsKinds()),
              "a policy of the registry lacks a member of its contract");

template <class Quant, class Backend, class... ExpertsTypes>
constexpr auto cells_of(Pack<ExpertsTypes...>) {
  return std::array{make_cell<Quant, Backend, ExpertsTypes>()...};
}
template <class Quant, class... BackendTypes>
constexpr auto cells_of_backends(Pack<BackendTypes...>) {
  return std::array{cells_of<Quant, BackendTypes>(ExpertsKinds())...};
}
template <class... Quants>
constexpr auto cells_of_quantizations(Pack<Quants...>) {
  return std::array{cells_of_backends<Quants>(Backends())...};
}
/// [quantisations][backends][experts]
constexpr auto kCells = cells_of_quantizations(Quantizations());

// ---- Its row.

struct BackendNames {
  std::string_view name, space;
};
struct ExpertsNames {
  std::string_view name, space;
  bool inside;
};
template <class... Types>
constexpr auto backend_names(Pack<Types...>) {
  return std::array{BackendNames{Types::kName, Types::Space::kName}...};
}
template <class... Types>
constexpr auto experts_names(Pack<Types...>) {
  return std::array{ExpertsNames{Types::kName, Types::Space::kName, moe::facts::routes_inside<Types>()}...};
}

/// The line of `moe list policies`.
registry::PolicyRow const& policy(std::string_view kind, std::string_view name, std::string_view space) {
  static std::vector<registry::PolicyRow> const table = registry::policy_table();
  auto const row = std::find_if(table.begin(), table.end(),
                                [&](auto const& r) { return r.kind == kind && r.name == name && (r.space == space || r.space == "both"); });
  if (row == table.end()) throw moe::Error(moe::ErrorCode::internal, text("the table of policies has no ", kind, " ", name));
  return *row;
}

/// How to build a composition that this program leaves out. Experts that route inside include the routing kernel themselves.
std::string own_program(BackendNames const& backend, ExpertsNames const& experts) {
  bool const needs_route = backend.space == "cuda" && !experts.inside;
  registry::PolicyRow const& exchange = policy("backend", backend.name, backend.space);
  registry::PolicyRow const& kernel = policy("experts", experts.name, experts.space);
  bool const one_target = kernel.links == exchange.links || kernel.links == "moe::moe";
  return text("a program that includes ", exchange.include, needs_route ? ", " : " and ", kernel.include,
              needs_route ? text(" and ", kDeviceRouting) : "", " and links the CMake target", one_target ? " " : "s ", exchange.links,
              one_target ? "" : text(" and ", kernel.links), " builds it; `moe list policies` names the types");
}

std::string build_hint(Missing missing, BackendNames const& backend, ExpertsNames const& experts) {
  switch (missing) {
    case Missing::nothing: return {};
    case Missing::component: return what_builds();
    case Missing::own_program: return own_program(backend, experts);
    case Missing::further_scheme:
      return text(own_program(backend, experts), ". This one has the scheme with ", registry::names(registry::sample_backends), " and ",
                  registry::names(registry::host_experts));
    case Missing::host_instance: break;
  }
  return text(own_program(backend, experts), ". This one has ", experts.inside ? "experts that route inside" : "windows", " with ",
              registry::names(registry::sample_quantizations), "; ", experts.inside ? "reference" : "all_to_all_v", " has every scheme");
}

std::vector<CompositionRow> make_rows() {
  auto const backends = backend_names(Backends());
  auto const experts = experts_names(ExpertsKinds());
  std::vector<CompositionRow> rows;
  for (std::size_t q = 0; q < kCells.size(); ++q) {
    for (std::size_t b = 0; b < backends.size(); ++b) {
      for (std::size_t e = 0; e < experts.size(); ++e) {
        Cell const& cell = kCells[q][b][e];
        rows.push_back({.quantization = Quantizations::kNames[q],
                        .backend = backends[b].name,
                        .space = backends[b].space,
                        .experts = experts[e].name,
                        .experts_space = experts[e].space,
                        .refused = cell.refused,
                        .run = cell.run,
                        .builds = build_hint(cell.missing, backends[b], experts[e])});
      }
    }
  }
  return rows;
}

}  // namespace

std::vector<CompositionRow> const& compositions() {
  static std::vector<CompositionRow> const all = make_rows();
  return all;
}

std::string CompositionRow::why() const {
  if (refused != nullptr) return refused;
  return text(builds, builds.empty() || condition.empty() ? "" : "; ", condition);
}

CompositionRow with_router(CompositionRow row, std::string const& router) {
  if (row.refused != nullptr) return row;
  RuleCheck const j =
      check_composition({"dynamic", router, std::string(row.quantization), std::string(row.backend), std::string(row.experts)});
  if (!j.broken.empty()) row.refused = j.broken.front().sentence;
  row.condition = j.condition;
  return row;
}

bool routes_inside(std::string_view experts) {
  return registry::has_name(registry::host_experts_inside, experts) || registry::has_name(registry::cuda_experts_inside, experts);
}

Runner runner_of(JobOptions const& o) {
  for (CompositionRow const& row : compositions()) {
    if (row.quantization != o.quantization || row.backend != o.backend || row.space != o.device || row.experts != o.experts) {
      continue;
    }
    if (row.experts_space != row.space) {
      throw moe::Error(moe::ErrorCode::config, text("--experts ", o.experts, " needs --device ", row.experts_space));
    }
    std::string const composition = text("--quantization ", o.quantization, " with --experts ", o.experts, " and --backend ", o.backend,
                                         " on --device ", o.device, ": ");
    if (row.refused != nullptr) {
      std::string_view sentence = row.refused;
      if (sentence.starts_with("moe: ")) sentence.remove_prefix(5);  // the tool begins its errors so itself
      throw moe::Error(moe::ErrorCode::config, text(composition, sentence));
    }
    if (row.run == nullptr) {
      throw moe::Error(moe::ErrorCode::unsupported, text(composition, "not in this program: ", row.builds));
    }
    return row.run;
  }
  throw moe::Error(moe::ErrorCode::internal, text("the registry has no composition ", o.quantization, ", ", o.backend, ", ", o.experts));
}

}  // namespace moe_tool
