// SPDX-License-Identifier: Apache-2.0
// examples/moe/cmd_list.cpp: `moe list`: the policies by name, and which compositions the rules allow, with the reason for the others.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <string>

#include "examples/moe/commands.hpp"
#include "moe/models/catalog.hpp"
#include "moe/models/registry.hpp"

namespace moe_tool {
namespace {

using namespace moe;
namespace hana = boost::hana;

template <class List>
void print_names(List list) {
  hana::for_each(list, [](auto type) { fmt::print("{}\n", decltype(type)::type::kName); });
}
template <class List>
void print_placed(List list) {
  hana::for_each(list, [](auto type) {
    using Policy = typename decltype(type)::type;
    fmt::print("{:<28} {}\n", Policy::kName, Policy::Space::kName);
  });
}

void print_models() {
  fmt::print("{:<26} {:>7} {:>13} {:>8} {:>5}  {}\n", "model", "hidden", "intermediate", "experts", "top", "router");
  hana::for_each(models::catalog, [](auto type) {
    using Model = typename decltype(type)::type;
    auto const number = [](int n) { return n == dynamic ? std::string("config") : std::to_string(n); };
    fmt::print("{:<26} {:>7} {:>13} {:>8} {:>5}  {}\n", Model::kName, number(Model::hidden), number(Model::intermediate),
               number(Model::num_experts), number(Model::topk), Model::Router::kName);
  });
}

void print_compositions() {
  fmt::print("{:<18} {:<26} {:<16} {}\n", "quantization", "backend", "experts", "");
  auto const all = hana::cartesian_product(hana::make_tuple(registry::quantizations, registry::all_backends, registry::all_experts));
  int legal = 0;
  int total = 0;
  hana::for_each(all, [&](auto triple) {
    using Quant = typename decltype(+triple[hana::size_c<0>])::type;
    using Backend = typename decltype(+triple[hana::size_c<1>])::type;
    using Experts = typename decltype(+triple[hana::size_c<2>])::type;
    char const* reason = registry::CompositionOf<registry::LayerFor<Experts>, Quant, Backend, Experts>::reason();
    legal += reason == nullptr ? 1 : 0;
    ++total;
    fmt::print("{:<18} {:<26} {:<16} {}\n", Quant::kName, fmt::format("{} ({})", Backend::kName, Backend::Space::kName), Experts::kName,
               reason == nullptr ? "yes" : fmt::format("no: {}", reason));
  });
  fmt::print("{} of {} compositions are allowed; each with any router\n", legal, total);
}

}  // namespace

void add_list(CLI::App& app) {
  auto* list = app.add_subcommand("list", "List policies, models or compositions");
  auto what = std::make_shared<std::string>();
  list->add_option("what", *what, "routers, quantizations, backends, experts, models or compositions")
      ->required()
      ->check(CLI::IsMember({"routers", "quantizations", "backends", "experts", "models", "compositions"}));
  list->callback([what] {
    if (*what == "routers") {
      print_names(registry::routers);
    }
    if (*what == "quantizations") {
      print_names(registry::quantizations);
    }
    if (*what == "backends") {
      print_placed(registry::all_backends);
    }
    if (*what == "experts") {
      print_placed(registry::all_experts);
    }
    if (*what == "models") {
      print_models();
    }
    if (*what == "compositions") {
      print_compositions();
    }
  });
}

}  // namespace moe_tool
