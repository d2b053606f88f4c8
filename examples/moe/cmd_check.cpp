// SPDX-License-Identifier: Apache-2.0
// examples/moe/cmd_check.cpp: `moe check`: whether a composition runs in this program, only the library has it, or rules forbid it, and all
// the rules that it breaks; and, for a pair that was measured with dispatch or combine beside the experts, the times and the choice.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "examples/moe/commands.hpp"
#include "examples/moe/compositions.hpp"
#include "examples/moe/rule_check.hpp"
#include "moe/core/error.hpp"
#include "moe/layer/schedule_choice.hpp"

namespace moe_tool {
namespace {

using moe::Error;
using moe::ErrorCode;
using moe::ScheduleTimes;
using moe::text;

struct CheckOptions {
  std::vector<std::string> compositions;
  bool json = false;
};

/// E_CONFIG unless there are five names.
Names parse(std::string const& composition) {
  std::string expected = "expected 5 names: ";
  for (char const* const position : kPositions) expected += text(position, position == kPositions.back() ? "" : ", ");
  if (composition.find_first_not_of(' ') == std::string::npos) {
    throw Error(ErrorCode::config, text("the composition is empty, ", expected));
  }
  std::vector<std::string> parts(1);
  for (char const c : composition) {
    if (c == ',') {
      parts.emplace_back();
    } else if (c != ' ') {
      parts.back() += c;
    }
  }
  if (parts.size() != kPositions.size()) {
    throw Error(ErrorCode::config, text("\"", composition, "\": ", parts.size(), parts.size() == 1 ? " name, " : " names, ", expected));
  }
  Names names;
  std::copy(parts.begin(), parts.end(), names.begin());
  return names;
}

/// The row of `moe list compositions`, with the router, of a composition that breaks no rule.
CompositionRow row_of(Names const& n, RuleCheck const& j) {
  for (CompositionRow const& row : compositions()) {
    if (row.quantization == n[2] && row.backend == n[3] && row.experts == n[4] && row.space == j.space && row.experts_space == j.space) {
      CompositionRow found = row;
      found.condition = j.condition;
      if (row.refused != nullptr) {
        found.builds = text("this program's layers have run-time types, for which: ", row.refused);
        found.refused = nullptr;
      }
      return found;
    }
  }
  throw Error(ErrorCode::internal, text("the registry has no composition ", n[2], ", ", n[3], ", ", n[4]));
}

/// A run-time router and a caller route as any model does; every other router is another choice than the model's.
std::string note(Names const& n, RuleCheck const& j) {
  bool const own = n[0] == "dynamic" || n[1] == j.router || n[1] == "any" || n[1] == "external" || j.router == "any";
  return own ? std::string{} : text(n[0], " routes with ", j.router, ", not with ", n[1]);
}

/// The schedule that is chosen for calls of as many tokens as a measured point has.
std::string_view choice_at(ScheduleTimes const& t) {
  return moe::name(moe::choose_schedule(t.backend, t.experts, t.scheme, {t.tokens, t.tokens}));
}

nlohmann::json to_json(ScheduleTimes const& t) {
  auto const ratio = [](double r) { return r == moe::kNotMeasured ? nlohmann::json() : nlohmann::json(r); };
  return {{"layer", t.layer},
          {"ranks", t.ranks},
          {"tokens", t.tokens},
          {"dispatch", ratio(t.dispatch)},
          {"combine", ratio(t.combine)},
          {"both", ratio(t.both)},
          {"source", t.source},
          {"choice", choice_at(t)}};
}

/// Prints what is said of one composition. How many rules it breaks.
std::size_t print(std::string const& composition, CheckOptions const& o) {
  Names names;
  RuleCheck checked;
  try {
    names = parse(composition);
    checked = check_composition(names);
  } catch (Error const& e) {
    throw CLI::ValidationError("check", e.message());
  }
  std::vector<Rule> const& broken = checked.broken;
  std::string_view answer = "no";
  std::string why;
  std::vector<ScheduleTimes> measured;
  if (broken.empty()) {
    measured = moe::schedule_times(names[3], names[4], names[2]);
    CompositionRow const row = row_of(names, checked);
    answer = row.answer();
    why = row.why();
  }
  std::string const remark = note(names, checked);
  if (o.json) {
    nlohmann::json rules = nlohmann::json::array();
    for (Rule const& rule : broken) rules.push_back({{"rule", rule.name}, {"why", rule.sentence}});
    nlohmann::json schedules = nlohmann::json::array();
    for (ScheduleTimes const& t : measured) schedules.push_back(to_json(t));
    nlohmann::json const out{{"answer", answer},    {"config", names[0]},  {"router", names[1]},    {"quantization", names[2]},
                             {"backend", names[3]}, {"experts", names[4]}, {"rules", rules},        {"space", checked.space},
                             {"why", why},          {"note", remark},      {"schedules", schedules}};
    fmt::print("{}\n", out.dump());
  } else {
    if (!broken.empty() && o.compositions.size() > 1) fmt::print("{}: no\n", composition);
    for (Rule const& rule : broken) fmt::print("{}: {}\n", rule.name, rule.sentence);
    if (broken.empty()) fmt::print("{}: {}{}{}\n", composition, answer, why.empty() ? "" : ": ", why);
    if (!remark.empty()) fmt::print("note: {}\n", remark);
    for (ScheduleTimes const& t : measured) fmt::print("schedule: {}; chosen: {}\n", moe::describe(t), choice_at(t));
  }
  return broken.size();
}

void run(CheckOptions const& o) {
  std::size_t refused = 0, rules = 0;
  for (std::string const& composition : o.compositions) {
    rules = print(composition, o);
    refused += rules > 0 ? 1 : 0;
  }
  if (refused == 0) return;
  if (o.compositions.size() > 1) {
    throw Error(ErrorCode::config, text(refused, " of ", o.compositions.size(), " compositions break rules"));
  }
  throw Error(ErrorCode::config, text(o.compositions.front(), ": breaks ", rules, rules == 1 ? " rule" : " rules"));
}

}  // namespace

void add_check(CLI::App& app) {
  auto* check =
      app.add_subcommand("check",
                         "Check a composition: it runs in this program, is in the library, or is forbidden; prints every rule that "
                         "it breaks, and exits with 1 if there is one. Of a legal one it prints what dispatch and combine beside the "
                         "experts were measured to take, and the schedule that follows");
  auto o = std::make_shared<CheckOptions>();
  check
      ->add_option(
          "composition", o->compositions,
          "One or several of \"Config, Router, Quantization, Backend, Experts\": a model of `moe list models`, or dynamic for "
          "dimensions of run time in bf16, and names of `moe list policies`. A backend of both spaces is the one of the experts' space")
      ->required();
  check->add_flag("--json", o->json, "Print a JSON object for each, one a line");
  check->callback([o] {
    require_one_rank("check");
    run(*o);
  });
}

}  // namespace moe_tool
