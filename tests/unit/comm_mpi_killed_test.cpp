// SPDX-License-Identifier: Apache-2.0
// tests/unit/comm_mpi_killed_test.cpp: MPI ranks of which one is killed. The others get an error that names the rank, destroy their window
// and end: through MPI_Finalize if mpirun or the program itself tells Open MPI not to wait there, else without MPI_Finalize. The test
// starts the ranks itself, because mpirun needs an option to let survivors run.
#include "moe/comm/mpi_shared.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "exit_code.hpp"
#include "killed_ranks.hpp"
#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/quantization/none.hpp"

namespace {

using moe::ErrorCode;
using Window = moe::comm::MpiShared;

constexpr int kRanks = 3;
constexpr int kSurvivorSeconds = 15;  // a survivor that hangs ends itself
constexpr int kRunSeconds = 60;
std::string program;

struct AnyActivation {};
struct Config : moe::LayerDefaults {
  using Activation = AnyActivation;
};

/// Two good rounds, then the last rank kills itself before its dispatch or before its combine. "" if the survivor got the right error.
template <class Backend>
std::string rounds(moe::comm::Mpi& comm, bool before_combine) {
  using Exchange = typename Backend::template Exchange<Config, moe::quantization::None, float>;
  int const experts = 2 * comm.size();
  int const last = comm.size() - 1;
  moe::Arena<moe::space::host> arena;
  Exchange x(comm, moe::Shape<Config>({16, 8, experts, 2}), 4, moe::ExpertPlacement(experts, comm.size()), {}, {}, arena);
  std::vector<float> in(4 * 16, 1.0F), out(4 * 16), weights(8, 0.5F);
  std::vector<std::int32_t> ids(8);
  for (std::size_t i = 0; i < 8; ++i) ids[i] = static_cast<std::int32_t>(i) % experts;
  try {
    for (int round = 0; round < 3; ++round) {
      bool const dies = round == 2 && comm.rank() == last;
      if (dies && !before_combine) raise(SIGKILL);
      x.prepare(
          {moe::make_rows(static_cast<float const*>(in.data()), 4, 16), moe::make_rows(static_cast<std::int32_t const*>(ids.data()), 4, 2),
           moe::make_rows(static_cast<float const*>(weights.data()), 4, 2)},
          {});
      auto y = x.expert_output();
      std::fill_n(y.data_handle(), y.size(), 1.0F);
      if (dies) raise(SIGKILL);
      x.finalize(moe::make_rows(out.data(), 4, 16), {});
    }
  } catch (moe::TransportError const& e) {
    if (e.code() != ErrorCode::timeout && e.code() != ErrorCode::peer) return moe::text("another error: ", e.what());
    return e.peer() == last ? "" : moe::text("another rank named: ", e.what());
  }
  return "no error";
}

/// The last rank kills itself, and rank 0 lives on without taking part, as one that waits for the dead rank elsewhere. Rank 1 misses both.
std::string beside_a_rank_that_waits(moe::comm::Mpi& comm) {
  if (comm.rank() == comm.size() - 1) raise(SIGKILL);
  if (comm.rank() == 0) {
    sleep(4);
    return "";
  }
  try {
    comm.barrier({});
  } catch (moe::TransportError const& e) {
    return e.code() == ErrorCode::timeout && e.peer() == comm.size() - 1 ? "" : moe::text("another rank named: ", e.what());
  }
  return "no error";
}

/// The program of one rank; writes its finding to folder/<rank> at its end. `ending`: "finalize"; "sets_option", which needs no option of
/// mpirun: the program sets Open MPI's variable before MPI_Init; or "exit", which neither sets it nor calls MPI_Finalize.
int run_rank(std::string const& backend, bool before_combine, std::string const& ending, std::string const& folder) {
  if (ending == "sets_option") setenv("OMPI_MCA_async_mpi_finalize", "1", 1);
  MPI_Init(nullptr, nullptr);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  alarm(kSurvivorSeconds);
  std::string finding;
  {
    moe::comm::Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 5000});
    if (backend == "no_backend") comm.set_timeout_ms(1000);  // less than rank 0 sleeps
    finding = backend == "no_backend"    ? beside_a_rank_that_waits(comm)
              : backend == "low_latency" ? rounds<moe::backends::LowLatency<Window>>(comm, before_combine)
                                         : rounds<moe::backends::HighThroughput<Window>>(comm, before_combine);
  }
  if (ending != "exit") MPI_Finalize();
  moe_test::write_finding(folder, rank, finding);
  _exit(0);  // runs no handler that would wait for the dead rank
}

class KilledMpiRank : public testing::TestWithParam<std::pair<char const*, char const*>> {};

TEST_P(KilledMpiRank, T10_SurvivorsComeOutOfFinalize) {
  if (!moe_test::has_open_mpi()) GTEST_SKIP() << "no mpirun of Open MPI, whose option leaves survivors alone";
  auto const [backend, death] = GetParam();
  moe_test::expect_survivors_fine(program, kRanks, {backend, death, "finalize"}, kRunSeconds);
}

// Not the rank that comes first among those that are missing.
TEST(KilledBesideOneThatWaits, T10_TheDeadRankIsNamed) {
  if (!moe_test::has_open_mpi()) GTEST_SKIP() << "no mpirun of Open MPI, whose option leaves survivors alone";
  moe_test::expect_survivors_fine(program, kRanks, {"no_backend", "barrier", "exit"}, kRunSeconds);
}

// What a program can do under an mpirun without `--mca async_mpi_finalize 1`.
class KilledMpiRankByDefault : public testing::TestWithParam<std::pair<char const*, char const*>> {};

TEST_P(KilledMpiRankByDefault, T10_SurvivorsEnd) {
  if (!moe_test::has_open_mpi()) GTEST_SKIP() << "no mpirun of Open MPI, whose option leaves survivors alone";
  auto const [death, ending] = GetParam();
  moe_test::expect_survivors_fine(program, kRanks, {"low_latency", death, ending}, kRunSeconds, moe_test::Fence::kept);
}

INSTANTIATE_TEST_SUITE_P(Endings, KilledMpiRankByDefault,
                         testing::Values(std::pair{"dispatch", "sets_option"}, std::pair{"combine", "sets_option"},
                                         std::pair{"dispatch", "exit"}, std::pair{"combine", "exit"}),
                         [](auto const& info) { return std::string(info.param.second) + "_before_" + info.param.first; });

INSTANTIATE_TEST_SUITE_P(Backends, KilledMpiRank,
                         testing::Values(std::pair{"low_latency", "dispatch"}, std::pair{"low_latency", "combine"},
                                         std::pair{"high_throughput", "combine"}),
                         [](auto const& info) { return std::string(info.param.first) + "_before_" + info.param.second; });

}  // namespace

int main(int argc, char** argv) {
  program = argv[0];
  if (argc == 6 && std::string(argv[1]) == "--rank") return run_rank(argv[2], std::string(argv[3]) == "combine", argv[4], argv[5]);
  testing::InitGoogleTest(&argc, argv);
  return moe_test::exit_code(RUN_ALL_TESTS());
}
