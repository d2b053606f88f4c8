// SPDX-License-Identifier: Apache-2.0
// examples/moe/cmd_serve_sim.cpp: `moe serve-sim`: replays routing step by step under load balancing, on the ranks of mpirun or on
// simulated ones, and shows what balancing does to them.
#include <fmt/core.h>
#include <mpi.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "examples/moe/chart.hpp"
#include "examples/moe/commands.hpp"
#include "examples/moe/job.hpp"
#include "examples/moe/mpi_session.hpp"
#include "examples/moe/option_values.hpp"
#include "examples/moe/output.hpp"
#include "examples/moe/serve_sim/mpi_ranks.hpp"
#include "examples/moe/serve_sim/serve_sim.hpp"
#include "examples/moe/serve_sim/simulated_ranks.hpp"
#include "moe/eplb/files.hpp"
#include "moe/parallel/construction.hpp"

namespace moe_tool {
namespace {

using namespace serve_sim;
using moe::Error;
using moe::ErrorCode;
using moe::text;

/// E_ARG if a file to write is the trace or the other file to write, or cannot be written.
void check_files(Options const& o, Routing const& routing) {
  if (!o.html.empty()) check_output(o.html, routing.files(), "--html");
  if (!o.maps.empty()) check_output(o.maps, routing.files(), "--save-placement");
  if (!o.html.empty() && !o.maps.empty() && weakly_canonical(absolute(o.html)) == weakly_canonical(absolute(o.maps))) {
    throw Error(ErrorCode::argument, moe::io::one_line("--html and --save-placement are one file, '", o.html.string(), "'"));
  }
}

/// All steps. Collective.
serve_sim::Report run_steps(Options const& o, Routing const& routing, Ranks& ranks, bool computed, bool shown) {
  serve_sim::Report report{
      .options = o, .num_experts = routing.num_experts(), .topk = routing.topk(), .ranks = ranks.size(), .computed = computed, .steps = {}};
  ProgressBar progress("step", o.steps, shown && !o.json);
  for (std::int64_t s = 0; s < o.steps; ++s) {
    report.steps.push_back(ranks.step(s));
    progress.show(s + 1);
  }
  return report;
}

void show(serve_sim::Report const& report, moe::eplb::ExpertMaps const& maps) {
  Options const& o = report.options;
  if (!o.html.empty()) {
    moe::io::AtomicFile file(o.html);
    std::string const page = as_html(report);
    file.write(std::as_bytes(std::span(page)));
    file.commit();
  }
  if (!o.maps.empty()) moe::eplb::save_maps(o.maps, {{"main", maps}});
  fmt::print("{}", o.json ? as_json(report) + "\n" : as_text(report));
}

void run_simulated(Options const& o) {
  if (o.eplb != "off" && o.eplb != "pause") {
    throw Error(ErrorCode::config,
                text("--eplb ", o.eplb, ": simulated ranks have no weights to move, expected off or pause. Fix: mpirun"));
  }
  Routing const routing(o);
  check_files(o, routing);
  SimulatedRanks ranks(o, routing);
  serve_sim::Report const report = run_steps(o, routing, ranks, false, true);
  show(report, ranks.maps());
}

/// E_MISMATCH, on every rank, naming the first option that differs from rank 0's.
void require_same_run(moe::comm::Mpi& comm, Options const& o) {
  moe::Fingerprint f;
  f.add("--steps", o.steps).add("--routing", moe::io::one_line(o.routing)).add("--experts", o.experts).add("--topk", o.topk);
  f.add("--tokens", o.tokens).add("--replicas", o.replicas).add("--eplb", o.eplb).add("--eplb-window", o.window);
  f.add("--eplb-interval", o.interval).add("--hidden", o.hidden).add("--intermediate", o.intermediate).add("--seed", o.seed);
  moe::detail::agree_on_fingerprint(comm, f);
}

void run_on_mpi(Options const& o) {
  MpiSession session(o.eplb == "background" ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED);
  try {
    moe::comm::Mpi comm(MPI_COMM_WORLD, {.timeout_ms = o.timeout_ms});
    std::optional<Routing> routing;
    together(comm, [&] {
      if (o.ranks > 0) throw Error(ErrorCode::config, text("--ranks ", o.ranks, ": mpirun gives the ranks. Fix: leave it out"));
      routing.emplace(o);
      if (comm.rank() == 0) check_files(o, *routing);
    });
    require_same_run(comm, o);
    std::unique_ptr<Ranks> ranks;
    together(comm, [&] { ranks = make_mpi_ranks(comm, o, *routing); });
    serve_sim::Report const report = run_steps(o, *routing, *ranks, true, comm.rank() == 0);
    together(comm, [&] {
      if (comm.rank() == 0) show(report, ranks->maps());
    });
  } catch (moe::TransportError const& e) {
    session.broken = true;
    std::fprintf(stderr, "moe: %s\n", e.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  } catch (Error const& e) {
    report_error(e.what());
    throw Reported{};
  }
}

}  // namespace

void add_serve_sim(CLI::App& app) {
  auto* command = app.add_subcommand("serve-sim", "Replay routing under load balancing (under mpirun: through an expert-parallel layer)");
  auto o = std::make_shared<Options>();
  auto const at_least_1 = whole_number(1, 1 << 30);
  command->add_option("--steps", o->steps, "Steps to run")->required()->check(whole_number(1, 1'000'000));
  command->add_option("--routing", o->routing, "zipf:S, or trace:FILE with topk_ids, as `moe layer` writes it, or a routing record")
      ->required();
  command->add_option("--experts", o->experts, "Experts (default: 256, or as many as the trace names); of zipf at most 1024")
      ->check(whole_number(1, serve_sim::kMostExperts));
  command->add_option("--topk", o->topk, "Experts of a token, of zipf")->check(at_least_1)->capture_default_str();
  command->add_option("--ranks", o->ranks, "Simulated ranks (default: 8); under mpirun its ranks run")->check(whole_number(1, 1 << 16));
  command->add_option("--tokens", o->tokens, "Tokens of a rank in a step")->check(whole_number(1, 1 << 20))->capture_default_str();
  command->add_option("--replicas", o->replicas, "Redundant experts X: experts + X physical experts in all")
      ->check(whole_number(0, 1 << 16));
  command
      ->add_option(
          "--eplb", o->eplb,
          "off; pause: weights move between two steps; under mpirun also stepwise (a layer in each step) and background (a thread)")
      ->check(one_of({"off", "pause", "stepwise", "background"}))
      ->capture_default_str();
  command->add_option("--eplb-window", o->window, "Steps whose load a plan is made from")
      ->check(whole_number(1, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--eplb-interval", o->interval,
                   "Steps between plans; the first comes after a quarter of them (default: half of --steps)")
      ->check(at_least_1);
  command->add_option("--hidden", o->hidden, "Of the layer, under mpirun")->check(whole_number(1, 1 << 16))->capture_default_str();
  command->add_option("--intermediate", o->intermediate, "Of the layer, under mpirun")
      ->check(whole_number(1, 1 << 16))
      ->capture_default_str();
  command->add_option("--seed", o->seed, "Of zipf")->check(whole_number(std::uint64_t{0}))->capture_default_str();
  command->add_option("--timeout-ms", o->timeout_ms, "Deadline of every wait for another rank")
      ->check(whole_number(std::int64_t{1}, std::int64_t{86'400'000}))
      ->capture_default_str();
  command->add_option("--html", o->html, "Page to write, with charts that a browser draws")->check(some_text("a file to write"));
  command->add_option("--save-placement", o->maps, "File to write the last placement to, for `moe layer --placement`")
      ->check(some_text("a file to write"));
  command->add_flag("--json", o->json, "Print the report as one JSON object");
  command->callback([o] {
    char const* const ranks = std::getenv("OMPI_COMM_WORLD_SIZE");
    if (ranks != nullptr && std::strtol(ranks, nullptr, 10) > 1) {
      run_on_mpi(*o);
    } else {
      run_simulated(*o);
    }
  });
}

}  // namespace moe_tool
