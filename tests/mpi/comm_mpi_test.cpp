// SPDX-License-Identifier: Apache-2.0
// tests/mpi/comm_mpi_test.cpp: collectives between processes against their expected results.
// moe-ranks: 1 2 3 4 5
#include "moe/comm/mpi.hpp"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <numeric>
#include <vector>

#include "expect_error.hpp"
#include "moe/core/contract/concepts.hpp"

namespace {

using moe::comm::Mpi;
static_assert(moe::Communicator<Mpi>);

float value(int rank, std::int64_t i) { return 1.0F / static_cast<float>(1 + rank * 7 + i % 1013); }

/// [size] counts, unequal and with a zero, and their exclusive sums.
struct Layout {
  explicit Layout(int size, std::int64_t scale = 1) {
    std::int64_t at = 0;
    for (int r = 0; r < size; ++r) {
      counts.push_back((r + 1) % 3 * 37 * scale);
      offsets.push_back(at);
      at += counts.back();
    }
    total = at;
  }
  std::vector<std::int64_t> counts, offsets;
  std::int64_t total = 0;
};

TEST(Mpi, AllGather) {
  Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  for (int n : {0, 1, 5}) {
    std::vector<int> const in(static_cast<std::size_t>(n), comm.rank());
    std::vector<int> out(static_cast<std::size_t>(n * comm.size()), -1);
    comm.all_gather(in.data(), n * 4, out.data(), {});
    for (int i = 0; i < n * comm.size(); ++i) EXPECT_EQ(out[static_cast<std::size_t>(i)], i / n);
  }
}

TEST(Mpi, AllGatherVInPlaceAndNot) {
  Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  Layout const l(comm.size());
  std::vector<unsigned char> out(static_cast<std::size_t>(l.total + 1), 255);
  for (bool in_place : {false, true}) {
    auto const me = static_cast<std::size_t>(comm.rank());
    std::vector<unsigned char> in(static_cast<std::size_t>(l.counts[me]), static_cast<unsigned char>(comm.rank() + 1));
    unsigned char* source = in_place ? out.data() + l.offsets[me] : in.data();
    std::copy(in.begin(), in.end(), source);
    comm.all_gather_v(source, l.counts[me], out.data(), l.counts.data(), l.offsets.data(), {});
    for (std::size_t r = 0; r < l.counts.size(); ++r) {
      for (std::int64_t i = 0; i < l.counts[r]; ++i) ASSERT_EQ(out[static_cast<std::size_t>(l.offsets[r] + i)], r + 1);
    }
    EXPECT_EQ(out.back(), 255) << "written past the end";
  }
}

// With such a limit, a message larger than INT_MAX would be posted with a truncated count.
TEST(Mpi, RefusesALimitThatDoesNotFitACount) {
  for (std::int64_t large : {std::int64_t{-1}, std::int64_t{1} << 31U, std::int64_t{1} << 33U}) {
    moe_test::expect_error(moe::ErrorCode::config, moe::text("large_message_bytes: ", large, " is out of range [0, 2147483647]"),
                           [&] { Mpi(MPI_COMM_WORLD, {.large_message_bytes = large}); });
  }
  Mpi const most(MPI_COMM_WORLD, {.timeout_ms = 20'000, .large_message_bytes = (std::int64_t{1} << 31U) - 1});
}

// The same messages, whole and counted in blocks.
TEST(Mpi, AllToAllVOfAnySize) {
  for (std::int64_t large : {std::int64_t{1} << 30U, std::int64_t{1} << 17U}) {
    Mpi comm(MPI_COMM_WORLD, {.large_message_bytes = large});
    int const me = comm.rank();
    auto bytes = [](int from, int to) { return static_cast<std::int64_t>((from + 2 * to) % 4) * 100'003; };
    std::vector<std::int64_t> in_counts, in_offsets, out_counts, out_offsets;
    std::int64_t in_total = 0, out_total = 0;
    for (int r = 0; r < comm.size(); ++r) {
      in_counts.push_back(bytes(me, r));
      in_offsets.push_back(in_total);
      in_total += in_counts.back();
      out_counts.push_back(bytes(r, me));
      out_offsets.push_back(out_total);
      out_total += out_counts.back();
    }
    std::vector<unsigned char> in(static_cast<std::size_t>(in_total)), out(static_cast<std::size_t>(out_total));
    auto byte = [](int from, int to, std::int64_t i) { return static_cast<unsigned char>(from * 31 + to * 17 + i % 251); };
    for (int r = 0; r < comm.size(); ++r) {
      auto const to = static_cast<std::size_t>(r);
      for (std::int64_t i = 0; i < in_counts[to]; ++i) in[static_cast<std::size_t>(in_offsets[to] + i)] = byte(me, r, i);
    }
    comm.all_to_all_v(in.data(), in_counts.data(), in_offsets.data(), out.data(), out_counts.data(), out_offsets.data(), {});
    for (int r = 0; r < comm.size(); ++r) {
      auto const from = static_cast<std::size_t>(r);
      for (std::int64_t i = 0; i < out_counts[from]; ++i) {
        ASSERT_EQ(out[static_cast<std::size_t>(out_offsets[from] + i)], byte(r, me, i)) << "from " << r << " at " << i;
      }
    }
  }
}

// Two transfers under way at once, another collective between, and the later one finished first.
// Each call is a round of its own, with its own requests: a group that makes no other collective between them.
TEST(Mpi, AllToAllVManyTimesInARow) {
  moe::comm::Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  auto const ranks = static_cast<std::size_t>(comm.size());
  std::vector<std::int64_t> counts(ranks, 1), offsets(ranks);
  std::iota(offsets.begin(), offsets.end(), 0);
  for (int call = 0; call < 1000; ++call) {
    std::vector<char> const in(ranks, static_cast<char>(call % 100 + comm.rank()));
    std::vector<char> out(ranks);
    comm.all_to_all_v(in.data(), counts.data(), offsets.data(), out.data(), counts.data(), offsets.data(), {});
    for (std::size_t r = 0; r < ranks; ++r) ASSERT_EQ(out[r], static_cast<char>(call % 100 + static_cast<int>(r))) << "call " << call;
  }
}

TEST(Mpi, TransfersUnderWay) {
  Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  std::int64_t const each = 70'000;
  auto const ranks = static_cast<std::size_t>(comm.size());
  std::vector<std::int64_t> const counts(ranks, each);
  std::vector<std::int64_t> offsets;
  for (int r = 0; r < comm.size(); ++r) offsets.push_back(each * r);
  auto byte = [](int which, int from, int to) { return static_cast<unsigned char>(1 + which * 100 + from * 10 + to); };
  std::vector<std::vector<unsigned char>> in(2, std::vector<unsigned char>(ranks * static_cast<std::size_t>(each))), out = in;
  Mpi::Transfer first(comm), second(comm);
  std::vector<Mpi::Transfer*> const transfers{&first, &second};
  for (int repeat = 0; repeat < 2; ++repeat) {
    for (int which = 0; which < 2; ++which) {
      auto const w = static_cast<std::size_t>(which);
      for (int r = 0; r < comm.size(); ++r) {
        std::fill_n(in[w].begin() + static_cast<std::ptrdiff_t>(offsets[static_cast<std::size_t>(r)]), each, byte(which, comm.rank(), r));
      }
      comm.start_all_to_all_v(*transfers[w], in[w].data(), counts.data(), offsets.data(), out[w].data(), counts.data(), offsets.data());
      EXPECT_TRUE(transfers[w]->under_way());
    }
    moe_test::expect_error(moe::ErrorCode::state, "mpi: the last transfer was not finished", [&] {
      comm.start_all_to_all_v(first, in[0].data(), counts.data(), offsets.data(), out[0].data(), counts.data(), offsets.data());
    });
    float x = 1;
    comm.all_reduce(&x, 1, &x, {});
    EXPECT_EQ(x, static_cast<float>(comm.size()));
    for (int which : {1, 0}) {
      auto const w = static_cast<std::size_t>(which);
      comm.finish(*transfers[w]);
      EXPECT_FALSE(transfers[w]->under_way());
      for (int r = 0; r < comm.size(); ++r) {
        auto const at = static_cast<std::size_t>(offsets[static_cast<std::size_t>(r)]);
        EXPECT_EQ(out[w][at], byte(which, r, comm.rank()));
        EXPECT_EQ(out[w][at + static_cast<std::size_t>(each) - 1], byte(which, r, comm.rank()));
      }
    }
  }
  moe_test::expect_error(moe::ErrorCode::state, "mpi: no transfer is under way", [&] { comm.finish(first); });
}

// start does not wait for a peer; finish does, and names the one that sent nothing.
TEST(Mpi, T10_AbsentRankOfATransferIsNamed) {
  Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 300});
  if (comm.size() == 1) GTEST_SKIP() << "one rank has no peers";
  int const absent = comm.size() - 1;
  if (comm.rank() == absent) return;
  std::vector<std::int64_t> const counts(static_cast<std::size_t>(comm.size()), 1), offsets(counts.size(), 0);
  unsigned char in = 1, out = 0;
  Mpi::Transfer transfer(comm);
  comm.start_all_to_all_v(transfer, &in, counts.data(), offsets.data(), &out, counts.data(), offsets.data());
  try {
    comm.finish(transfer);
    FAIL() << "no error";
  } catch (moe::TransportError const& e) {
    EXPECT_EQ(e.code(), moe::ErrorCode::timeout);
    EXPECT_EQ(e.peer(), absent);
  }
  EXPECT_THROW(comm.barrier({}), moe::Error) << "a failed group must not be used";
}

TEST(Mpi, BroadcastFromEveryRoot) {
  Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  for (int root = 0; root < comm.size(); ++root) {
    std::vector<int> data(1000, comm.rank() == root ? root + 5 : -1);
    comm.broadcast(data.data(), 4000, root, {});
    EXPECT_EQ(data, std::vector<int>(1000, root + 5));
  }
}

// Rank order decides the bits of a float sum, so the result is compared exactly.
TEST(Mpi, SumsAreInRankOrder) {
  Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  Layout const l(comm.size(), 29);
  std::vector<float> in(static_cast<std::size_t>(l.total)), expected(in.size());
  for (std::size_t i = 0; i < in.size(); ++i) {
    in[i] = value(comm.rank(), static_cast<std::int64_t>(i));
    for (int r = 0; r < comm.size(); ++r) expected[i] += value(r, static_cast<std::int64_t>(i));
  }
  auto const me = static_cast<std::size_t>(comm.rank());
  std::vector<float> part(static_cast<std::size_t>(l.counts[me]));
  comm.reduce_scatter_v(in.data(), l.counts.data(), l.offsets.data(), part.data(), {});
  for (std::size_t i = 0; i < part.size(); ++i) ASSERT_EQ(part[i], expected[static_cast<std::size_t>(l.offsets[me]) + i]) << i;

  std::vector<float> out(in.size());
  comm.all_reduce(in.data(), l.total, out.data(), {});
  EXPECT_EQ(out, expected);
  comm.all_reduce(in.data(), l.total, in.data(), {});
  EXPECT_EQ(in, expected) << "in place";
  for (std::int64_t n : {0, 1, 2}) {
    std::vector<float> small(2, static_cast<float>(comm.rank() + 1));
    comm.all_reduce(small.data(), n, small.data(), {});
    auto const sum = static_cast<float>(comm.size() * (comm.size() + 1) / 2);
    for (std::int64_t i = 0; i < 2; ++i) {
      EXPECT_EQ(small[static_cast<std::size_t>(i)], i < n ? sum : static_cast<float>(comm.rank() + 1));
    }
  }
}

TEST(Mpi, BarrierHoldsEveryRank) {
  Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  auto const start = std::chrono::steady_clock::now();
  if (comm.rank() == comm.size() - 1) usleep(200'000);
  comm.barrier({});
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(150));
}

// T10: a missing rank. The others get the error within a second of the deadline, and it names that rank.
TEST(Mpi, T10_AbsentRankIsNamed) {
  Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 300});
  if (comm.size() == 1) GTEST_SKIP() << "one rank has no peers";
  int const absent = comm.size() - 1;
  if (comm.rank() == absent) return;
  comm.set_phase("dispatch");
  auto const start = std::chrono::steady_clock::now();
  float x = 1, y = 0;
  try {
    comm.all_reduce(&x, 1, &y, {});
    FAIL() << "no error";
  } catch (moe::TransportError const& e) {
    EXPECT_EQ(e.code(), moe::ErrorCode::timeout);
    EXPECT_EQ(e.phase(), "dispatch");
    EXPECT_EQ(e.rank(), comm.rank());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(1300));
  EXPECT_THROW(comm.barrier({}), moe::Error) << "a failed group must not be used";
}

TEST(Mpi, T10_AbsentRankOfAGatherIsNamed) {
  Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 300});
  if (comm.size() == 1) GTEST_SKIP() << "one rank has no peers";
  int const absent = comm.size() - 1;
  if (comm.rank() == absent) return;
  try {
    comm.barrier({});
    FAIL() << "no error";
  } catch (moe::TransportError const& e) {
    EXPECT_EQ(e.code(), moe::ErrorCode::timeout);
    EXPECT_EQ(e.peer(), absent);
    EXPECT_EQ(e.phase(), "barrier");
  }
}

TEST(Mpi, ALateRankIsWaitedFor) {
  Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  if (comm.rank() == 0) usleep(300'000);
  comm.barrier({});
}

// A rank that does not run until its deadline is over, as on a machine with too few cores, finds what its peers have sent meanwhile.
TEST(Mpi, AStoppedRankFindsWhatHasArrived) {
  Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  if (comm.size() == 1) GTEST_SKIP() << "one rank has no peers";
  comm.barrier({});
  pid_t stopping = 0;
  if (comm.rank() == 0) {
    comm.set_timeout_ms(1'000);
    pid_t const self = getpid();
    stopping = fork();
    if (stopping == 0) {
      usleep(100'000);
      kill(self, SIGSTOP);
      usleep(3'000'000);
      kill(self, SIGCONT);
      _exit(0);
    }
  } else {
    usleep(300'000);
  }
  comm.barrier({});
  if (stopping > 0) waitpid(stopping, nullptr, 0);
}

TEST(Mpi, TooLongAMessageIsAMismatch) {
  Mpi comm(MPI_COMM_WORLD, {.timeout_ms = 2'000});
  if (comm.size() == 1) GTEST_SKIP() << "one rank has no peers";
  std::vector<int> data(4096);
  if (comm.rank() == 0) {
    comm.broadcast(data.data(), 4096, 0, {});
  } else {
    try {
      comm.broadcast(data.data(), 64, 0, {});
      FAIL() << "no error";
    } catch (moe::TransportError const& e) {
      EXPECT_EQ(e.code(), moe::ErrorCode::mismatch);
      EXPECT_EQ(e.peer(), 0);
    }
  }
}

}  // namespace
