// SPDX-License-Identifier: Apache-2.0
// examples/moe/rule_check.cpp: the rules of core/contract/check.hpp over names, from tables of what they say of the registry's policies.
#include "examples/moe/rule_check.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <utility>

#include "examples/moe/policy_lists.hpp"
#include "examples/moe/refusal.hpp"
#include "moe/models/catalog.hpp"
#include "moe/models/registry.hpp"

namespace moe_tool {
namespace {

using namespace moe;

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
template <class... Policies>
constexpr auto weights_on_input(Pack<Policies...>) {
  return std::array{Policies::kWeightOnInput...};
}
template <class... Policies>
constexpr auto backend_facts(Pack<Policies...>) {
  return std::array{BackendFacts{Policies::Space::kKind, Policies::kFormat, facts::follows_routing<Policies>()}...};
}
template <class... Policies>
constexpr auto experts_facts(Pack<Policies...>) {
  return std::array{ExpertsFacts{Policies::Space::kKind, facts::routes_inside<Policies>(), router_row<Policies>(Routers())}...};
}
constexpr auto kWeightOnInput = weights_on_input(Routers());
constexpr auto kBackends = backend_facts(Backends());
constexpr auto kExperts = experts_facts(ExpertsKinds());
constexpr auto kCarries = carries_table(Quantizations());

/// A model, or the layer of run-time dimensions.
struct Config {
  std::string_view name, router;
  int hidden, topk, num_experts;
  std::size_t element_bytes;
  std::array<std::array<Broken, ExpertsKinds::kSize>, Backends::kSize> exchange;
  std::array<std::array<Broken, ExpertsKinds::kSize>, Quantizations::kSize> scheme;
};
template <class Layer>
constexpr Config config_of(std::string_view name, std::string_view router) {
  return {.name = name,
          .router = router,
          .hidden = Layer::hidden,
          .topk = Layer::topk,
          .num_experts = Layer::num_experts,
          .element_bytes = sizeof(typename Layer::Act),
          .exchange = exchange_table<Layer>(Backends()),
          .scheme = scheme_table<Layer>(Quantizations())};
}
using Dynamic = models::RuntimeLayer<bf16, bf16>;
template <class... Models>
constexpr auto configs_of(Pack<Models...>) {
  return std::array{config_of<Models>(Models::kName, Models::Router::kName)..., config_of<Dynamic>("dynamic", "any")};
}
constexpr auto kConfigs = configs_of(decltype(detail::pack_of(models::catalog))());

// ---- The rules of one composition.

/// The backend of that name in a space; the one of the other space if there is no such.
std::size_t find_backend(std::string_view name, SpaceKind space) {
  std::size_t const first = place_of<Backends>(name);
  for (std::size_t place = first; place < Backends::kSize; ++place) {
    if (Backends::kNames[place] == name && kBackends[place].space == space) return place;
  }
  return first;
}

std::vector<std::string> config_names() {
  std::vector<std::string> out;
  out.reserve(kConfigs.size());
  for (Config const& config : kConfigs) out.emplace_back(config.name);
  return out;
}

/// E_CONFIG naming the first position whose name its list does not have, and the position that the name would fit.
void check_names(Names const& n) {
  std::array<std::vector<std::string>, 5> const known{config_names(), names_of<Routers>(), names_of<Quantizations>(), names_of<Backends>(),
                                                      names_of<ExpertsKinds>()};
  auto const has = [&](std::size_t position, std::string const& name) {
    return std::find(known[position].begin(), known[position].end(), name) != known[position].end();
  };
  auto const position = [](std::size_t i) { return text("position ", i + 1, " (", kPositions[i], ")"); };
  for (std::size_t i = 0; i < known.size(); ++i) {
    if (has(i, n[i])) continue;
    std::string elsewhere;
    for (std::size_t other = 0; other < known.size(); ++other) {
      if (has(other, n[i])) elsewhere = text(", a name for ", position(other));
    }
    throw Error(ErrorCode::config, text(position(i), ": \"", n[i], "\"", elsewhere, ", expected one of ", joined(known[i])));
  }
}

template <class List>
struct NamesOf;
template <class... Verdicts>
struct NamesOf<std::tuple<Verdicts...>> {
  static constexpr std::array<std::string_view, sizeof...(Verdicts)> kNames{Verdicts::kRule...};
};

template <class R>
constexpr Rule rule() {
  return {R::kName, R::kSentence};
}

}  // namespace

RuleCheck check_composition(Names const& n) {
  check_names(n);
  Config const& config = *std::find_if(kConfigs.begin(), kConfigs.end(), [&](Config const& c) { return c.name == n[0]; });
  std::size_t const router = place_of<Routers>(n[1]);
  std::size_t const quant = place_of<Quantizations>(n[2]);
  std::size_t const e = place_of<ExpertsKinds>(n[4]);
  ExpertsFacts const& experts = kExperts[e];
  std::size_t const b = find_backend(n[3], experts.space);
  BackendFacts const& backend = kBackends[b];

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
  // The order in which a compiler would report them; the list is the same for all policies.
  constexpr auto kOrder = NamesOf<moe::detail::Verdicts<Dynamic, routing::AnyRouter, Quant, Backend, Experts>::type>::kNames;
  std::ranges::sort(broken, {}, [&](Rule const& one) { return std::ranges::find(kOrder, one.name) - kOrder.begin(); });
  bool const only_topk_one = config.topk == dynamic && !moe::detail::weight_on_input_fits(kWeightOnInput[router], backend.format, 2);
  return {.broken = std::move(broken),
          .space = experts.space == SpaceKind::cuda ? "cuda" : "host",
          .router = config.router,
          .condition = only_topk_one ? "with topk = 1 only: this router weights the input" : ""};
}

}  // namespace moe_tool
