// SPDX-License-Identifier: Apache-2.0
// tests/unit/runner_killed_test.cpp: a rank of a runner's grid kills itself in each stage of a forward. The others get an error within the
// deadline that names it, and a runner over a new group of them computes what one rank does.
#include <gtest/gtest.h>
#include <mpi.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../mpi/runner_grid_test/harness.hpp"
#include "exit_code.hpp"
#include "expect_close.hpp"
#include "killed_ranks.hpp"
#include "moe/backends/window/host/low_latency.hpp"

namespace {

using namespace moe_test::grid;
using moe_test::differs_from_one_rank;

constexpr int kRanks = 4;
constexpr std::int64_t kDeadline = 2000;
constexpr int kSurvivorSeconds = 25;  // a survivor that hangs ends itself
constexpr int kRunSeconds = 60;
std::string program;

/// Ends this process in a stage of the second forward.
struct Death {
  Phase phase;
  bool now;
  void begin(Phase p) const {
    if (now && p == phase) raise(SIGKILL);
  }
  void end(Phase) const {}
};

/// The ranks that are left, as a data-parallel group of their own.
std::string new_group_works(Model const& m) {
  MPI_Group world = MPI_GROUP_NULL, living = MPI_GROUP_NULL;
  MPI_Comm_group(MPI_COMM_WORLD, &world);
  int const dead = kRanks - 1;
  MPI_Group_excl(world, 1, &dead, &living);
  MPI_Comm handle = MPI_COMM_NULL;
  MPI_Comm_create_group(MPI_COMM_WORLD, living, 1, &handle);
  comm::Mpi group(handle, {.timeout_ms = kDeadline});
  using Backend = backends::AllToAllV<comm::Mpi>;
  MoeParallel const p = parallel_of({1, kRanks - 1, 1, true}, group.rank(), Backend::kFacts);
  Rank<Backend, experts::Reference<float>> rank(p, m, nullptr, &group);
  std::vector<float> const x = bf16_numbers(70 + group.rank(), 3 * kHidden);
  return differs_from_one_rank(rank.forward(x), on_one_rank(m, x), 2e-5F);
}

struct HalfParts : RankParts {
  using DualBatch = runner::dual_batch::Halves;
};

/// "" if everything was as it must be.
template <class Backend, class Parts = RankParts>
std::string survive(Grid const& grid, SharedOutput shared, Phase phase) {
  comm::Mpi world(MPI_COMM_WORLD, {.timeout_ms = kDeadline});
  int const group = world.rank() / grid.tp;
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, group, world.rank(), &part);
  comm::Mpi tp(part, {.timeout_ms = kDeadline});
  Model const m{.form = {false, false, shared}};
  BackendFacts facts = Backend::kFacts;
  facts.sequence_parallel = false;
  Rank<Backend, experts::Reference<float>, Parts> rank(parallel_of(grid, world.rank(), facts), m, grid.tp > 1 ? &tp : nullptr, &world);
  if constexpr (std::is_same_v<Parts, HalfParts>) rank.runner.decide_dual_batch(true);
  std::vector<float> const x = bf16_numbers(50 + group, 5 * kHidden);
  if (std::string const wrong = differs_from_one_rank(rank.forward(x), on_one_rank(m, x), 2e-5F); !wrong.empty())
    return "before the death: " + wrong;
  auto const start = std::chrono::steady_clock::now();
  int const victim = kRanks - 1;
  try {
    rank.forward(x, Death{phase, world.rank() == victim});
    if (group != victim / grid.tp) rank.forward(x);  // the death was in a sum over another group
    return "no error";
  } catch (TransportError const& e) {
    if (e.code() != ErrorCode::timeout && e.code() != ErrorCode::peer) return text("another error: ", e.what());
    // Its own TP group names it by its rank there, as it names the rank that waited.
    int const wanted = group == victim / grid.tp && e.rank() != world.rank() ? victim % grid.tp : victim;
    if (e.peer() != wanted) return text("another rank named: ", e.what());
  }
  // Twice the deadline: the TP group's agreement that follows the error waits for the dead rank, too.
  if (std::chrono::steady_clock::now() - start > std::chrono::milliseconds(2 * kDeadline + 3000)) return "later than the deadline";
  return new_group_works({.form = {false, false, SharedOutput::complete}});
}

/// The program of one rank; writes its finding to folder/<rank> after MPI_Finalize.
int run_rank(std::string const& form, int phase, std::string const& folder) {
  MPI_Init(nullptr, nullptr);
  alarm(kSurvivorSeconds);
  auto const stage = static_cast<Phase>(phase);
  std::string finding;
  try {
    finding =
        form == "tp_all_to_all_v" ? survive<backends::AllToAllV<comm::Mpi>>({kRanks, 1, 1, true}, SharedOutput::partial, stage)
        : form == "two_groups_all_to_all_v"
            ? survive<backends::AllToAllV<comm::Mpi>>({2, kRanks / 2, 1, true}, SharedOutput::partial, stage)
        : form == "two_groups_low_latency"
            ? survive<backends::LowLatency<comm::MpiShared>>({2, kRanks / 2, 1, true}, SharedOutput::partial, stage)
        : form == "dp_halves" ? survive<backends::AllToAllV<comm::Mpi>, HalfParts>({1, kRanks, 1, true}, SharedOutput::complete, stage)
        : form == "dp_chunks" ? survive<backends::AllToAllV<comm::Mpi>, RankChunkParts>({1, kRanks, 1, true}, SharedOutput::complete, stage)
        : form == "dp_low_latency"
            ? survive<backends::LowLatency<comm::MpiShared>>({1, kRanks, 1, true}, SharedOutput::complete, stage)
            : survive<backends::AllGatherReduceScatter<comm::Mpi>>({1, kRanks, 1, true}, SharedOutput::complete, stage);
  } catch (std::exception const& e) {
    finding = e.what();
  }
  int const rank = world_rank();
  MPI_Finalize();
  moe_test::write_finding(folder, rank, finding);
  return 0;
}

class KilledRunnerRank : public testing::TestWithParam<std::pair<char const*, Phase>> {};

TEST_P(KilledRunnerRank, SurvivorsNameIt) {
  if (!moe_test::has_open_mpi()) GTEST_SKIP() << "no mpirun of Open MPI, whose option leaves survivors alone";
  auto const [form, phase] = GetParam();
  moe_test::expect_survivors_fine(program, kRanks, {form, std::to_string(static_cast<int>(phase))}, kRunSeconds);
}

// Gate, dispatch, experts, combine by every kind of transport; the sum over the TP group where there is one; in halves and in
// chunks; the sum over one of two TP groups, whose other rank then comes to no exchange either.
INSTANTIATE_TEST_SUITE_P(Stages, KilledRunnerRank,
                         testing::Values(std::pair{"tp_all_to_all_v", Phase::route}, std::pair{"tp_all_to_all_v", Phase::dispatch},
                                         std::pair{"tp_all_to_all_v", Phase::experts}, std::pair{"tp_all_to_all_v", Phase::reduction},
                                         std::pair{"dp_low_latency", Phase::route}, std::pair{"dp_low_latency", Phase::combine},
                                         std::pair{"dp_gather", Phase::dispatch}, std::pair{"dp_gather", Phase::combine},
                                         std::pair{"tp_all_to_all_v", Phase::combine}, std::pair{"dp_low_latency", Phase::experts},
                                         std::pair{"dp_halves", Phase::dispatch}, std::pair{"dp_halves", Phase::combine},
                                         std::pair{"dp_chunks", Phase::shared}, std::pair{"dp_chunks", Phase::combine},
                                         std::pair{"two_groups_all_to_all_v", Phase::reduction},
                                         std::pair{"two_groups_low_latency", Phase::reduction}),
                         [](auto const& info) { return text(info.param.first, "_in_", name(info.param.second)); });

}  // namespace

int main(int argc, char** argv) {
  program = argv[0];
  if (argc == 5 && std::string(argv[1]) == "--rank") return run_rank(argv[2], std::atoi(argv[3]), argv[4]);
  testing::InitGoogleTest(&argc, argv);
  return moe_test::exit_code(RUN_ALL_TESTS());
}
