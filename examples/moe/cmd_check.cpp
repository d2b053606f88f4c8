// SPDX-License-Identifier: Apache-2.0
// examples/moe/cmd_check.cpp: `moe check`: every rule that a composition breaks, by the names of its policies.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "examples/moe/commands.hpp"
#include "moe/models/catalog.hpp"
#include "moe/models/registry.hpp"

namespace moe_tool {
namespace {

using namespace moe;
namespace hana = boost::hana;

/// What the composition names, in the order of ModularKernel's arguments.
struct Names {
  std::string config, router, quantization, backend, experts;
};
struct Broken {
  std::string_view rule;
  std::string_view sentence;
};

/// A layer of these types whose dimensions are known at run time. Models share most of them.
template <class ActT, class WeightT, class ActivationT>
struct Types : LayerDefaults {
  using Act = ActT;
  using Weight = WeightT;
  using Activation = ActivationT;
};

template <class Rule>
void add(std::vector<Broken>& broken) {
  broken.push_back({Rule::kName, Rule::kSentence});
}
template <class List>
void add_broken(std::vector<Broken>& broken) {
  [&]<class... Verdicts>(std::tuple<Verdicts...> const*) {
    ((Verdicts::kHolds ? void() : broken.push_back({Verdicts::kRule, Verdicts::kSentence})), ...);
  }(static_cast<List const*>(nullptr));
}

/// Calls f(hana::type<Backend>) for the backend of that name in a space; for the one of the other space if there is no such.
template <class F>
void with_backend(std::string_view wanted, SpaceKind space, F&& f) {
  auto const of_space = [&](auto list) {
    return registry::has_name(list, wanted) ? (registry::with_policy(list, "backend", wanted, f), true) : false;
  };
  bool const cuda = space == SpaceKind::cuda;
  if (!(cuda ? of_space(registry::all_cuda_backends) : of_space(registry::all_host_backends))) {
    registry::with_policy(registry::all_backends, "backend", wanted, f);
  }
}

template <class Config>
void judge_exchange(Names const& n, std::vector<Broken>& broken) {
  registry::with_policy(registry::all_experts, "experts", n.experts, [&](auto experts) {
    using Experts = typename decltype(experts)::type;
    with_backend(n.backend, Experts::Space::kKind, [&](auto backend) {
      add_broken<typename detail::ExchangeVerdicts<Config, typename decltype(backend)::type, Experts>::all>(broken);
    });
  });
}

template <class Config>
void judge_scheme(Names const& n, std::vector<Broken>& broken) {
  registry::with_policy(registry::all_experts, "experts", n.experts, [&](auto experts) {
    using Experts = typename decltype(experts)::type;
    if (!detail::rows_aligned(Experts::Space::kKind, Config::hidden, sizeof(typename Config::Act))) add<rules::RowsAligned>(broken);
    registry::with_policy(registry::quantizations, "quantization", n.quantization, [&](auto quant) {
      add_broken<typename detail::SchemeVerdicts<Config, typename decltype(quant)::type, Experts>::all>(broken);
    });
  });
}

/// The rules of experts that route inside.
void judge_inside(Names const& n, std::vector<Broken>& broken) {
  auto const both = hana::concat(registry::host_experts_inside, registry::cuda_experts_inside);
  if (!registry::has_name(both, n.experts)) return;
  registry::with_policy(both, "experts", n.experts, [&](auto experts) {
    using Experts = typename decltype(experts)::type;
    with_backend(n.backend, Experts::Space::kKind, [&](auto backend) {
      if (facts::follows_routing<typename decltype(backend)::type>()) add<rules::MonolithicTransport>(broken);
    });
    registry::with_policy(registry::routers, "router", n.router, [&](auto router) {
      if (!facts::supports_router<Experts, typename decltype(router)::type>()) add<rules::MonolithicRouter>(broken);
    });
  });
}

/// The rules that need neither the configuration's types nor the experts' kernels.
void judge_facts(Names const& n, int topk, int num_experts, std::vector<Broken>& broken) {
  judge_inside(n, broken);
  bool on_input = false;
  registry::with_policy(registry::routers, "router", n.router, [&](auto router) { on_input = decltype(router)::type::kWeightOnInput; });
  SpaceKind space = SpaceKind::host;
  registry::with_policy(registry::all_experts, "experts", n.experts, [&](auto e) { space = decltype(e)::type::Space::kKind; });
  if (!detail::topk_in_bounds(topk, num_experts)) add<rules::TopKInBounds>(broken);
  with_backend(n.backend, space, [&](auto backend) {
    using Backend = typename decltype(backend)::type;
    if (!detail::weight_on_input_fits(on_input, Backend::kFormat, topk)) add<rules::WeightOnInputNeedsTopKOne>(broken);
    registry::with_policy(registry::quantizations, "quantization", n.quantization, [&](auto quant) {
      add_broken<std::tuple<detail::CarriesVerdict<typename decltype(quant)::type, Backend>>>(broken);
    });
  });
}

template <class Config>
std::vector<Broken> judge(Names const& n) {
  std::vector<Broken> broken;
  judge_exchange<Types<typename Config::Act, typename Config::Weight, typename Config::Activation>>(n, broken);
  judge_facts(n, Config::topk, Config::num_experts, broken);
  judge_scheme<Config>(n, broken);
  return broken;
}

/// E_CONFIG listing the models if `config` is none, nor dynamic.
std::vector<Broken> judge(Names const& n) {
  if (n.config == "dynamic") return judge<models::RuntimeLayer<bf16, bf16>>(n);
  std::vector<Broken> broken;
  registry::with_policy(models::catalog, "model (or dynamic)", n.config,
                        [&](auto model) { broken = judge<typename decltype(model)::type>(n); });
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
    std::vector<Broken> broken;
    try {
      broken = judge(parse(*composition));
    } catch (Error const& e) {
      throw CLI::ValidationError("check", e.message());
    }
    for (Broken const& b : broken) fmt::print("{}: {}\n", b.rule, b.sentence);
    if (!broken.empty()) {
      throw Error(ErrorCode::config, text(*composition, ": breaks ", broken.size(), broken.size() == 1 ? " rule" : " rules"));
    }
    fmt::print("{}: yes\n", *composition);
  });
}

}  // namespace moe_tool
