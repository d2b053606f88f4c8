// SPDX-License-Identifier: Apache-2.0
// tests/mpi/parallel_step_vote_test.cpp: a vote over a communicator gives every rank the decision computed from the table of all votes.
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "moe/comm/mpi.hpp"
#include "moe/parallel/dp_metadata.hpp"

namespace {

using moe::StepVote;

TEST(StepVote, SameDecisionOnEveryRank) {
  moe::comm::Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  for (int round = 0; round < 6; ++round) {
    auto const vote = [&](int r) { return StepVote{40 + 7 * r, 48 + 8 * r, round < 4 || r != 0, round == 5 ? 0 : 1 + (r + round) % 2}; };
    std::vector<std::optional<StepVote>> all;
    for (int r = 0; r < comm.size(); ++r) all.emplace_back(vote(r));
    auto const got = moe::decide_step_over(comm, vote(comm.rank()));
    EXPECT_EQ(got, moe::decide_step(all)) << "round " << round;
    EXPECT_EQ(got.num_tokens.size(), static_cast<std::size_t>(comm.size()));
    EXPECT_EQ(got.ubatch, round < 4) << "round " << round;
  }
}

}  // namespace
