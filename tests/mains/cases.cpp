// SPDX-License-Identifier: Apache-2.0
// tests/mains/cases.cpp: cases of every outcome; check.py chooses some of them and looks at the exit code.
#include <gtest/gtest.h>
#ifdef MOE_TEST_RANKS
#include <mpi.h>
#endif

namespace {

int rank() {
  int rank = 0;
#ifdef MOE_TEST_RANKS
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
#endif
  return rank;
}

TEST(Skips, One) { GTEST_SKIP() << "a reason"; }
TEST(Skips, Two) { GTEST_SKIP() << "another reason"; }
TEST(Passes, One) { EXPECT_EQ(rank(), rank()); }
TEST(Fails, One) { FAIL() << "as it should"; }
TEST(SkipsOnRank0, One) {
  if (rank() == 0) GTEST_SKIP() << "rank 0";
}
TEST(FailsOnRank1, One) { EXPECT_NE(rank(), 1); }

}  // namespace
