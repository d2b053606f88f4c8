// SPDX-License-Identifier: Apache-2.0
// examples/moe/cmd_list.cpp: `moe list`: the policies by name and by type, and which compositions this program runs, which only the library
// has, and which the rules forbid.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "examples/moe/commands.hpp"
#include "examples/moe/compositions.hpp"
#include "examples/moe/option_values.hpp"
#include "examples/moe/policy_lists.hpp"
#include "moe/models/catalog.hpp"
#include "moe/models/policy_table.hpp"
#include "moe/models/registry.hpp"
#include "moe/models/scheme_support.hpp"

namespace moe_tool {
namespace {

using namespace moe;
namespace hana = boost::hana;
using nlohmann::json;

struct ListOptions {
  std::string what;
  std::string space, backend, experts, quantization, router;
  bool json = false;

  bool filtered() const { return !(space + backend + experts + quantization + router).empty(); }
};

void print_json(json const& rows) { fmt::print("{}\n", rows.dump()); }

// ---- Policies.

/// "native" and so on, for one scheme on each architecture.
std::string on_architectures(std::string_view scheme) {
  std::string out;
  for (registry::SchemeSupport const& s : registry::scheme_support()) {
    if (s.scheme == scheme) {
      out += text(out.empty() ? "" : ", ", "sm_", s.architecture, " ", quantization::name(s.support));
    }
  }
  return out;
}

json policy_json(registry::PolicyRow const& row) {
  json out{{"kind", row.kind}, {"name", row.name},       {"space", row.space},
           {"type", row.type}, {"include", row.include}, {"links", row.links}};
  if (row.kind == "router") out["include_cuda"] = kDeviceRouting;
  for (registry::SchemeSupport const& s : registry::scheme_support()) {
    if (row.kind == "quantization" && s.scheme == row.name) {
      out["architectures"][text("sm_", s.architecture)] = {{"support", quantization::name(s.support)}, {"experts", s.experts}};
    }
  }
  return out;
}

/// The rows of one kind; of all if it is empty.
std::vector<registry::PolicyRow> policies_of(std::string_view kind) {
  std::vector<registry::PolicyRow> rows = registry::policy_table();
  std::erase_if(rows, [&](registry::PolicyRow const& row) { return !kind.empty() && row.kind != kind; });
  return rows;
}

void print_policies(ListOptions const& o, std::string_view kind) {
  std::vector<registry::PolicyRow> rows = policies_of(kind);
  std::erase_if(rows, [&](registry::PolicyRow const& row) { return !o.space.empty() && row.space != "both" && row.space != o.space; });
  if (o.json) {
    json out = json::array();
    std::transform(rows.begin(), rows.end(), std::back_inserter(out), policy_json);
    print_json(out);
    return;
  }
  for (registry::PolicyRow const& row : rows) {
    if (kind.empty()) {
      std::string const besides = row.kind == "router" ? text(", cuda: also ", kDeviceRouting) : "";
      fmt::print("{:<13} {:<36} {:<5} {:<60} {:<46} {}{}\n", row.kind, row.name, row.space, row.type, row.include, row.links, besides);
    } else if (kind == "quantization") {
      fmt::print("{:<28} {}\n", row.name, on_architectures(row.name));
    } else if (kind == "router") {
      fmt::print("{}\n", row.name);
    } else {
      fmt::print("{:<28} {}\n", row.name, row.space);
    }
  }
}

void print_models(bool as_json) {
  json out = json::array();
  auto const number = [](int n) { return n == dynamic ? std::string("config") : std::to_string(n); };
  if (!as_json) {
    fmt::print("{:<26} {:>7} {:>13} {:>8} {:>5}  {}\n", "model", "hidden", "intermediate", "experts", "top", "router");
  }
  hana::for_each(models::catalog, [&](auto type) {
    using Model = typename decltype(type)::type;
    std::array<std::string, 4> const sizes{number(Model::hidden), number(Model::intermediate), number(Model::num_experts),
                                           number(Model::topk)};
    if (as_json) {
      out.push_back({{"model", Model::kName},
                     {"hidden", sizes[0]},
                     {"intermediate", sizes[1]},
                     {"experts", sizes[2]},
                     {"top", sizes[3]},
                     {"router", Model::Router::kName}});
    } else {
      fmt::print("{:<26} {:>7} {:>13} {:>8} {:>5}  {}\n", Model::kName, sizes[0], sizes[1], sizes[2], sizes[3], Model::Router::kName);
    }
  });
  if (as_json) {
    print_json(out);
  }
}

// ---- Compositions.

void print_rows(ListOptions const& o, std::vector<CompositionRow> const& rows) {
  json out = json::array();
  for (CompositionRow const& r : rows) {
    if (o.json) {
      out.push_back({{"answer", r.answer()},
                     {"quantization", r.quantization},
                     {"backend", r.backend},
                     {"space", r.space},
                     {"experts", r.experts},
                     {"router", o.router.empty() ? "any" : o.router},
                     {"why", r.why()}});
    } else {
      std::string const answer = text(r.answer(), r.answer() == "yes" ? "" : ":");
      std::string const line =
          fmt::format("{:<20} {:<17} {:<30} {:<18} {}", answer, r.quantization, text(r.backend, " (", r.space, ")"), r.experts, r.why());
      fmt::print("{}\n", line.substr(0, line.find_last_not_of(' ') + 1));
    }
  }
  if (o.json) {
    print_json(out);
  }
}

std::string count(std::vector<CompositionRow> const& rows) {
  auto const of = [&](std::string_view answer) {
    return std::count_if(rows.begin(), rows.end(), [&](CompositionRow const& r) { return r.answer() == answer; });
  };
  return text(of("yes"), " of ", rows.size(), " compositions run in this program, ", of("not in this program"),
              " more are in the library, the rules forbid ", of("no"));
}

/// Rows: backends; columns: experts. Each cell: with how many quantisations the pair runs here, and how many more the library has.
void print_summary(std::vector<CompositionRow> const& rows) {
  for (std::string_view const space : {"host", "cuda"}) {
    std::vector<std::string_view> backends, experts;
    std::map<std::pair<std::string_view, std::string_view>, std::array<int, 2>> counts;
    auto const add = [](std::vector<std::string_view>& names, std::string_view name) {
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
    };
    for (CompositionRow const& r : rows) {
      if (r.space != space || r.experts_space != space) continue;
      add(backends, r.backend);
      add(experts, r.experts);
      auto& [here, elsewhere] = counts[{r.backend, r.experts}];
      here += r.answer() == "yes" ? 1 : 0;
      elsewhere += r.answer() == "not in this program" ? 1 : 0;
    }
    auto const width = [](std::string_view name) { return std::max(name.size(), std::size_t{17}); };
    std::string line = fmt::format("{:<26}", space);
    for (std::string_view const name : experts) line += fmt::format(" {:>{}}", name, width(name));
    fmt::print("{}\n", line);
    for (std::string_view const backend : backends) {
      line = fmt::format("{:<26}", backend);
      for (std::string_view const name : experts) {
        auto const& [here, elsewhere] = counts[{backend, name}];
        std::string const cell = here + elsewhere == 0 ? "-" : elsewhere == 0 ? text(here) : text(here, " + ", elsewhere);
        line += fmt::format(" {:>{}}", cell, width(name));
      }
      fmt::print("{}\n", line);
    }
  }
  fmt::print(
      "n + m: with n quantisations in this program, with m more in the library; -: none. Each with any router\n"
      "{}\n"
      "One by one: --space, --backend, --experts, --quantization, --router, or --json for all\n",
      count(rows));
}

void print_compositions(ListOptions const& o) {
  std::vector<CompositionRow> rows = compositions();
  auto const keep = [](std::string const& wanted, std::string_view name) { return wanted.empty() || wanted == name; };
  std::erase_if(rows, [&](CompositionRow const& r) {
    return !(keep(o.space, r.space) && keep(o.space, r.experts_space) && keep(o.backend, r.backend) && keep(o.experts, r.experts) &&
             keep(o.quantization, r.quantization));
  });
  if (!o.router.empty()) {
    for (CompositionRow& r : rows) r = with_router(r, o.router);
  }
  if (!o.filtered() && !o.json) {
    print_summary(rows);
    return;
  }
  print_rows(o, rows);
  if (!o.json) {
    fmt::print("{}\n", count(rows));
  }
}

void run_list(ListOptions const& o) {
  if (o.filtered() && o.what != "compositions" && (o.what != "policies" || !(o.backend + o.experts + o.quantization + o.router).empty())) {
    throw CLI::ValidationError("list",
                               text("filters are for `list compositions`, --space also for `list policies`; this is `list ", o.what, "`"));
  }
  if (o.what == "compositions") {
    print_compositions(o);
  } else if (o.what == "models") {
    print_models(o.json);
  } else {
    std::string const kind = o.what == "policies" ? "" : o.what == "experts" ? o.what : o.what.substr(0, o.what.size() - 1);
    print_policies(o, kind);
  }
}

}  // namespace

void add_list(CLI::App& app) {
  auto* list = app.add_subcommand("list", "List policies, models or compositions");
  auto o = std::make_shared<ListOptions>();
  std::vector<std::string> const known{"routers", "quantizations", "backends", "experts", "policies", "models", "compositions"};
  list->add_option("what", o->what,
                   "routers, quantizations, backends, experts, models; policies: all of them with C++ type, header and CMake target; "
                   "compositions: what runs in this program, what the library has, what the rules forbid")
      ->required()
      ->check(one_of(known));
  list->add_option("--space", o->space, "Only this memory space: host or cuda")->check(one_of({"host", "cuda"}));
  list->add_option("--backend", o->backend, "Only compositions with this backend")->check(one_of(names_of<Backends>(), false));
  list->add_option("--experts", o->experts, "Only compositions with these experts")->check(one_of(names_of<ExpertsKinds>(), false));
  list->add_option("--quantization", o->quantization, "Only compositions with this quantisation")
      ->check(one_of(names_of<Quantizations>(), false));
  list->add_option("--router", o->router, "List compositions with this router; every one runs with any")
      ->check(one_of(names_of<Routers>(), false));
  list->add_flag("--json", o->json, "Print one JSON array");
  list->callback([o] {
    require_one_rank("list");
    run_list(*o);
  });
}

}  // namespace moe_tool
