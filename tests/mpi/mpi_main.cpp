// SPDX-License-Identifier: Apache-2.0
// tests/mpi/mpi_main.cpp: runs the tests on every rank. Rank 0 prints as usual, the others only their failures; one rank that fails
// fails the run on all.
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdio>
#include <string>

#include "mpi_exit_code.hpp"

namespace {

/// What a rank other than 0 prints: its number before each failure.
class FailuresOfRank : public testing::EmptyTestEventListener {
 public:
  explicit FailuresOfRank(int rank) : rank_(rank) {}
  void OnTestStart(testing::TestInfo const& test) override { test_ = std::string(test.test_suite_name()) + "." + test.name(); }
  void OnTestPartResult(testing::TestPartResult const& result) override {
    if (!result.failed()) return;
    std::fprintf(stderr, "rank %d: %s: %s:%d: %s\n", rank_, test_.c_str(), result.file_name() == nullptr ? "?" : result.file_name(),
                 result.line_number(), result.message());
  }

 private:
  int rank_;
  std::string test_;  // a query to GoogleTest while it reports would deadlock
};

/// Ranks must enter each test together: otherwise a rank that ended the last test early would use up its deadline in its first wait.
class EnterTogether : public testing::EmptyTestEventListener {
 public:
  void OnTestStart(testing::TestInfo const&) override { MPI_Barrier(MPI_COMM_WORLD); }
};

}  // namespace

/// A test that uses MPI from several threads at once defines its own, which returns MPI_THREAD_MULTIPLE.
__attribute__((weak)) int wanted_thread_level() { return MPI_THREAD_FUNNELED; }

int main(int argc, char** argv) {
  int level = 0;
  MPI_Init_thread(&argc, &argv, wanted_thread_level(), &level);
  testing::InitGoogleTest(&argc, argv);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  listeners.Append(new EnterTogether);
  if (rank != 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new FailuresOfRank(rank));
  }
  int const result = moe_test::exit_code_of_all_ranks(moe_test::exit_code(RUN_ALL_TESTS()));
  MPI_Finalize();
  return result;
}
