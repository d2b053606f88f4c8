// SPDX-License-Identifier: Apache-2.0
// examples/moe/cmd_check.cpp: `moe check`: every rule that a composition breaks, by the names of its policies.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "examples/moe/commands.hpp"
#include "examples/moe/policy_lists.hpp"
#include "moe/models/catalog.hpp"
#include "moe/models/registry.hpp"

namespace moe_tool {
namespace {

using namespace moe;

/// What the composition names, in the order of ModularKernel's arguments.
struct Names {
  std::string config, router, quantization, backend, experts;
};
struct Rule {
  std::string_view name;
  std::string_view sentence;
};

/// A layer of a model's types whose dimensions are known at run time. Models share most of them.
template <class ActT, class WeightT, class ActivationT>
struct Types : LayerDefaults {
  using Act = ActT;
  using Weight = WeightT;
  using Activation = ActivationT;
};

// ---- What the rules say of each pair or triple of policies, as constants: bit i is set if verdict i of the list does not hold.

using Broken = std::uint8_t;

template <class List>
struct RulesOf;
template <class... Verdicts>
struct RulesOf<std::tuple<Verdicts...>> {
  static_assert(sizeof...(Verdicts) <= 8, "a bit for each verdict");
  static constexpr std::array<Rule, sizeof...(Verdicts)> kRules{{{Verdicts::kRule, Verdicts::kSentence}...}};
  static constexpr Broken kBroken = [] {
    unsigned bits = 0, next = 1;
    ((bits |= Verdicts::kHolds ? 0U : next, next <<= 1), ...);
    return static_cast<Broken>(bits);
  }();
};
template <class Config, class Backend, class Experts>
using ExchangeRules =
    RulesOf<typename moe::detail::ExchangeVerdicts<Types<typename Config::Act, typename Config::Weight, typename Config::Activation>,
                                                   Backend, Experts>::all>;
template <class Config, class Quant, class Experts>
using SchemeRules = RulesOf<typename moe::detail::SchemeVerdicts<Config, Quant, Experts>::all>;
template <class Quant, class Backend>
using CarriesRule = RulesOf<std::tuple<moe::detail::CarriesVerdict<Quant, Backend>>>;

template <class Config, class Backend, class... Experts>
constexpr auto exchange_row(Pack<Experts...>) {
  return std::array{ExchangeRules<Config, Backend, Experts>::kBroken...};
}
template <class Config, class... BackendTypes>
constexpr auto exchange_table(Pack<BackendTypes...>) {
  return std::array{exchange_row<Config, BackendTypes>(ExpertsKinds())...};
}
template <class Config, class Quant, class... Experts>
constexpr auto scheme_row(Pack<Experts...>) {
  return std::array{SchemeRules<Config, Quant, Experts>::kBroken...};
}
template <class Config, class... Quants>
constexpr auto scheme_table(Pack<Quants...>) {
  return std::array{scheme_row<Config, Quants>(ExpertsKinds())...};
}
template <class Quant, class... BackendTypes>
constexpr auto carries_row(Pack<BackendTypes...>) {
  return std::array{CarriesRule<Quant, BackendTypes>::kBroken...};
}
template <class... Quants>
constexpr auto carries_table(Pack<Quants...>) {
  return std::array{carries_row<Quants>(Backends())...};
}
template <class Experts, class... RouterTypes>
constexpr auto router_row(Pack<RouterTypes...>) {
  return std::array{facts::supports_router<Experts, RouterTypes>()...};
}

struct BackendFacts {
  SpaceKind space;
  ActivationFormat format;
  bool follows_routing;
};
struct ExpertsFacts {
  SpaceKind space;
  bool inside;
  std::array<bool, Routers::kSize> supports_router;
};
template <class... Types>
constexpr auto weights_on_input(Pack<Types...>) {
  return std::array{Types::kWeightOnInput...};
}
template <class... Types>
constexpr auto backend_facts(Pack<Types...>) {
  return std::array{BackendFacts{Types::Space::kKind, Types::kFormat, facts::follows_routing<Types>()}...};
}
template <class... Types>
constexpr auto experts_facts(Pack<Types...>) {
  return std::array{ExpertsFacts{Types::Space::kKind, facts::routes_inside<Types>(), router_row<Types>(Routers())}...};
}
constexpr auto kWeightOnInput = weights_on_input(Routers());
constexpr auto kBackends = backend_facts(Backends());
constexpr auto kExperts = experts_facts(ExpertsKinds());
constexpr auto kCarries = carries_table(Quantizations());

/// A model, or the layer of run-time dimensions.
struct Config {
  std::string_view name;
  int hidden, topk, num_experts;
  std::size_t element_bytes;
  std::array<std::array<Broken, ExpertsKinds::kSize>, Backends::kSize> exchange;
  std::array<std::array<Broken, ExpertsKinds::kSize>, Quantizations::kSize> scheme;
};
template <class Layer>
constexpr Config config_of(std::string_view name) {
  return {name,
          Layer::hidden,
          Layer::topk,
          Layer::num_experts,
          sizeof(typename Layer::Act),
          exchange_table<Layer>(Backends()),
          scheme_table<Layer>(Quantizations())};
}
using Dynamic = models::RuntimeLayer<bf16, bf16>;
template <class... Models>
constexpr auto configs_of(Pack<Models...>) {
  return std::array{config_of<Models>(Models::kName)..., config_of<Dynamic>("dynamic")};
}
constexpr auto kConfigs = configs_of(decltype(detail::pack_of(models::catalog))());

// ---- The rules of one composition.

/// The place of a policy in its list; E_CONFIG listing the names if there is none.
template <class Policies, class List>
std::size_t find(List list, char const* what, std::string_view wanted) {
  std::size_t const place = place_of<Policies>(wanted);
  if (place == Policies::kSize) {
    throw Error(ErrorCode::config, text("unknown ", what, " \"", wanted, "\"; known: ", registry::names(list)));
  }
  return place;
}
Config const& find_config(std::string_view wanted) {
  auto const* const config = std::find_if(kConfigs.begin(), kConfigs.end(), [&](Config const& c) { return c.name == wanted; });
  if (config == kConfigs.end()) {
    throw Error(ErrorCode::config, text("unknown model (or dynamic) \"", wanted, "\"; known: ", registry::names(models::catalog)));
  }
  return *config;
}
/// The backend of that name in a space; the one of the other space if there is no such.
std::size_t find_backend(std::string_view wanted, SpaceKind space) {
  std::size_t const first = find<Backends>(registry::all_backends, "backend", wanted);
  for (std::size_t place = first; place < Backends::kSize; ++place) {
    if (Backends::kNames[place] == wanted && kBackends[place].space == space) return place;
  }
  return first;
}

template <class R>
constexpr Rule rule() {
  return {R::kName, R::kSentence};
}

/// Every rule that the composition breaks.
std::vector<Rule> judge(Names const& n) {
  Config const& config = find_config(n.config);
  std::size_t const e = find<ExpertsKinds>(registry::all_experts, "experts", n.experts);
  ExpertsFacts const& experts = kExperts[e];
  std::size_t const b = find_backend(n.backend, experts.space);
  BackendFacts const& backend = kBackends[b];
  std::size_t const router = find<Routers>(registry::routers, "router", n.router);
  std::size_t const quant = find<Quantizations>(registry::quantizations, "quantization", n.quantization);

  std::vector<Rule> broken;
  auto const require = [&](bool holds, Rule rule) {
    if (!holds) broken.push_back(rule);
  };
  auto const add = [&](Broken bits, auto const& rules) {
    for (std::size_t i = 0; i < rules.size(); ++i) require((bits >> i & 1U) == 0, rules[i]);
  };
  using Quant = quantization::None;  // any: the lists of verdicts are the same
  using Backend = backends::NoExpertParallel<space::host>;
  using Experts = experts::OneDnn;
  add(config.exchange[b][e], ExchangeRules<Dynamic, Backend, Experts>::kRules);
  require(!experts.inside || !backend.follows_routing, rule<rules::MonolithicTransport>());
  require(experts.supports_router[router], rule<rules::MonolithicRouter>());
  require(moe::detail::topk_in_bounds(config.topk, config.num_experts), rule<rules::TopKInBounds>());
  require(moe::detail::weight_on_input_fits(kWeightOnInput[router], backend.format, config.topk), rule<rules::WeightOnInputNeedsTopKOne>());
  add(kCarries[quant][b], CarriesRule<Quant, Backend>::kRules);
  require(moe::detail::rows_aligned(experts.space, config.hidden, config.element_bytes), rule<rules::RowsAligned>());
  add(config.scheme[quant][e], SchemeRules<Dynamic, Quant, Experts>::kRules);
  return broken;
}

/// E_CONFIG unless there are five names.
Names parse(std::string const& composition) {
  constexpr char const* kExpected = "expected 5 names: Config, Router, Quantization, Backend, Experts";
  if (composition.find_first_not_of(' ') == std::string::npos) {
    throw Error(ErrorCode::config, text("the composition is empty, ", kExpected));
  }
  std::vector<std::string> parts(1);
  for (char const c : composition) {
    if (c == ',') {
      parts.emplace_back();
    } else if (c != ' ') {
      parts.back() += c;
    }
  }
  if (parts.size() != 5) {
    throw Error(ErrorCode::config, text("\"", composition, "\": ", parts.size(), parts.size() == 1 ? " name, " : " names, ", kExpected));
  }
  return {parts[0], parts[1], parts[2], parts[3], parts[4]};
}

}  // namespace

void add_check(CLI::App& app) {
  auto* check = app.add_subcommand("check", "Judge a composition: prints every rule that it breaks, and exits with 1 if there is one");
  auto composition = std::make_shared<std::string>();
  check
      ->add_option(
          "composition", *composition,
          "\"Config, Router, Quantization, Backend, Experts\": a model of `moe list models`, or dynamic for dimensions of run time "
          "in bf16, and names of `moe list policies`. A backend of both spaces is the one of the experts' space")
      ->required();
  check->callback([composition] {
    require_one_rank("check");
    std::vector<Rule> broken;
    try {
      broken = judge(parse(*composition));
    } catch (Error const& e) {
      throw CLI::ValidationError("check", e.message());
    }
    for (Rule const& rule : broken) fmt::print("{}: {}\n", rule.name, rule.sentence);
    if (!broken.empty()) {
      throw Error(ErrorCode::config, text(*composition, ": breaks ", broken.size(), broken.size() == 1 ? " rule" : " rules"));
    }
    fmt::print("{}: yes\n", *composition);
  });
}

}  // namespace moe_tool
