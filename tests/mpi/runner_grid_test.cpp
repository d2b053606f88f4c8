// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_grid_test.cpp: every host composition of the registry, on every grid of tensor, data and context parallel ranks, gives
// what one rank gives; wrong calls reach all ranks. The compositions are in runner_grid_test/.
// moe-ranks: 1 2 4 8 16
#include <algorithm>

#include "runner_grid_test/harness.hpp"

namespace {

using namespace moe_test::grid;
using moe_test::expect_error;

/// Fails if another number of combinations ran than is stated here.
class AllRan : public testing::Environment {
 public:
  void TearDown() override {
    if (testing::GTEST_FLAG(filter) != "*") return;
    std::map<int, Count> const expected{
        {1, {20, 1536, 0}}, {2, {20, 2688, 1920}}, {4, {20, 4320, 3360}}, {8, {20, 384, 384}}, {16, {20, 132, 124}}};
    EXPECT_EQ(count, expected.at(world_size())) << "another number of combinations is legal, or some did not run: count again";
  }
};
[[maybe_unused]] testing::Environment* const all_ran = testing::AddGlobalTestEnvironment(new AllRan);

// A rank with a wrong argument, and a TP group whose ranks differ: all ranks get an error, and the next call works.
TEST(RunnerGridErrors, ReachAllRanks) {
  int const n = world_size(), last = n - 1;
  if (n == 1) GTEST_SKIP() << "needs more than one rank";
  int const tp = 2;
  Model const m{.form = {false, false, SharedOutput::partial}, .experts = std::max(kExperts, n)};
  Rank<backends::AllGatherReduceScatter<comm::Mpi>, experts::Reference<float>> rank({tp, n / tp, 1, true}, m, world_rank(),
                                                                                    {.name = "gather", .transport = Transport::gather});
  bool const errs = world_rank() == last;
  std::vector<float> const x = numbers(50, 3 * kHidden);
  std::vector<float> out(x.size());
  auto forward = [&](std::int64_t rows, std::int64_t out_rows) {
    rank.runner.forward(make_rows(x.data(), rows, kHidden), make_rows(out.data(), out_rows, kHidden));
  };
  if (errs) {
    expect_error(ErrorCode::argument, "output: rows: 2, expected 3", [&] { forward(3, 2); });
  } else {
    expect_error(ErrorCode::peer, "", [&] { forward(3, 3); });
  }
  forward(3, 3);
  if (rank.moe.dp_rank == rank.moe.dp_size - 1) {
    expect_error(ErrorCode::mismatch, "TP ranks hold the same tokens", [&] { forward(errs ? 2 : 3, errs ? 2 : 3); });
  } else {
    expect_error(ErrorCode::peer, "", [&] { forward(3, 3); });
  }
  forward(3, 3);
}

}  // namespace
