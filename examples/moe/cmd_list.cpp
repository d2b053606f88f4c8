// SPDX-License-Identifier: Apache-2.0
// examples/moe/cmd_list.cpp: `moe list`: the policies by name, and which compositions the rules allow, with the reason for the others.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

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

/// A line of the table of compositions.
struct Row {
  char const* quantization;
  char const* backend;
  char const* space;
  char const* experts;
  char const* reason;  ///< why not; null: allowed
  bool left_out;       ///< allowed, but this program leaves out schemes whose bytes a window backend moves like any others
};
template <class Quant, class Backend, class Experts>
Row row() {
  constexpr bool kLeftOut = hana::contains(registry::window_backends, hana::type_c<Backend>) &&
                            !hana::contains(registry::window_quantizations, hana::type_c<Quant>);
  return {Quant::kName,
          Backend::kName,
          Backend::Space::kName,
          Experts::kName,
          registry::CompositionOf<registry::LayerFor<Experts>, Quant, Backend, Experts>::reason(),
          kLeftOut};
}
std::vector<Row> composition_rows() {
  std::vector<Row> rows;
  hana::for_each(registry::quantizations, [&](auto quant) {
    hana::for_each(registry::all_backends, [&](auto backend) {
      hana::for_each(registry::all_experts, [&](auto experts) {
        rows.push_back(row<typename decltype(quant)::type, typename decltype(backend)::type, typename decltype(experts)::type>());
      });
    });
  });
  return rows;
}

void print_compositions() {
  fmt::print("{:<18} {:<26} {:<16} {}\n", "quantization", "backend", "experts", "");
  std::vector<Row> const rows = composition_rows();
  for (Row const& r : rows) {
    std::string const verdict = r.reason != nullptr ? text("no: ", r.reason)
                                : r.left_out
                                    ? text("yes, but this program has it with ", registry::names(registry::window_quantizations), " only")
                                    : "yes";
    fmt::print("{:<18} {:<26} {:<16} {}\n", r.quantization, fmt::format("{} ({})", r.backend, r.space), r.experts, verdict);
  }
  fmt::print("{} of {} compositions are allowed; each with any router\n",
             std::count_if(rows.begin(), rows.end(), [](Row const& r) { return r.reason == nullptr; }), rows.size());
}

}  // namespace

void add_list(CLI::App& app) {
  auto* list = app.add_subcommand("list", "List policies, models or compositions");
  auto what = std::make_shared<std::string>();
  list->add_option("what", *what, "routers, quantizations, backends, experts, models or compositions")
      ->required()
      ->check(CLI::IsMember({"routers", "quantizations", "backends", "experts", "models", "compositions"}));
  list->callback([what] {
    require_one_rank("list");
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
