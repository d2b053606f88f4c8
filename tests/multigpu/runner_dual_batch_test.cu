// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_dual_batch_test.cu: between GPUs, a block in two halves has the bits of the whole batch over every backend that can
// send and wait apart, called and in graphs; all ranks split a batch or none, as the step's vote says; a rank's error ends both halves, and
// the next forward works. A chain of blocks: runner_dual_batch_chain_test.cu.
// moe-ranks: 2
#include <mpi.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>

#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/backends/window/device/pplx/exchange.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/parallel/dp_metadata.hpp"
#include "tests/gpu/dual_batch_block.cuh"

namespace {

using namespace moe_test;
using Window = comm::NcclSymmetric;

template <class Backend, class Experts>
void ranks(comm::Nccl& comm, int workers) {
  DualBlock<Backend, Experts> block(comm, {}, workers);
  for (std::int64_t const rows : {300, 17, 2}) block.expect_same_bits(rows);
  block.expect_same_bits(comm.rank() == 0 ? 40 : 3);  // uneven, and none
  block.expect_same_bits(comm.rank() == 0 ? 33 : 0);

  // One rank brings more rows than there may be: both halves end on all ranks.
  block.bring(7);
  block.launch(32, false);
  auto const want = block.result(32);
  for (int repeat = 0; repeat < 3; ++repeat) {
    bool const errs = comm.rank() == comm.size() - 1;
    if (errs) {
      expect_error(ErrorCode::capacity, "301 rows exceed", [&] { block.launch(301, true); });
    } else {
      block.launch(32, true);
    }
    check_cuda(cudaStreamSynchronize(block.stream()), "cudaStreamSynchronize");
    if (errs) {
      EXPECT_NO_THROW(block.block().check());
    } else {
      expect_error(ErrorCode::peer, text("rank ", comm.size() - 1, " abandoned the call"), [&] {
        if (repeat == 0) return block.block().wait(block.stream());
        block.block().check();
      });
    }
    try {  // what else the exchanges report of this round
      block.block().check();
    } catch (Error const& e) {
      EXPECT_EQ(e.code(), ErrorCode::peer);
    }
    block.bring(7);
    block.launch(32, true);
    EXPECT_EQ(block.result(32), want);
  }
  for (int round = 0; round < 200; ++round) block.launch(32, round % 3 != 0);
  EXPECT_EQ(block.result(32), want);
}

TEST(DualBatch, N11_N12_SameBitsBetweenRanks) {
  comm::Mpi host(MPI_COMM_WORLD);
  comm::Nccl comm = comm::Nccl::over_communicator(host, {.timeout_ms = 5'000});
  ranks<backends::HighThroughput<Window>, experts::HopperContiguous>(comm, 0);
  ranks<backends::HighThroughput<Window>, experts::HopperContiguous>(comm, 100);
  ranks<backends::LowLatency<Window>, experts::HopperMasked>(comm, 0);
  ranks<backends::LowLatencyRankMajor<Window>, experts::HopperContiguous>(comm, 0);
  ranks<backends::Pplx<Window>, experts::HopperMasked>(comm, 0);
}

/// The experts of one half throw on the last rank: it gets that error, the others learn of it from wait() or check() long before the
/// deadline, and the next forward works on all.
template <class Backend, class Experts>
void experts_fail(comm::Mpi& host, comm::Nccl& comm) {
  DualBlock<Backend, FailingExperts<Experts>> block(comm, {}, 0);
  bool const errs = comm.rank() == comm.size() - 1;
  block.bring(7);
  block.launch(33, false);
  auto const want = block.result(33);
  int repeat = 0;
  for (int const call : {1, 2, 0, 1, 1, 2, 2}) {  // 0: the call of a whole batch
    SCOPED_TRACE(text(Backend::kName, ", call ", call));
    host.barrier({});
    auto const start = std::chrono::steady_clock::now();
    FailingCall::fails_on = errs ? std::max(call, 1) : 0;
    if (errs) {
      expect_error(ErrorCode::internal, "experts: injected", [&] { block.launch(33, call > 0); });
      EXPECT_EQ(FailingCall::fails_on, 0);
      check_cuda(cudaStreamSynchronize(block.stream()), "cudaStreamSynchronize");
      EXPECT_NO_THROW(block.block().check()) << "the caller has had the error";
    } else {
      block.launch(33, call > 0);
      expect_error(ErrorCode::peer, text("rank ", comm.size() - 1, " abandoned the call"), [&] {
        if (repeat % 2 == 0) return block.block().wait(block.stream());
        check_cuda(cudaStreamSynchronize(block.stream()), "cudaStreamSynchronize");
        block.block().check();
      });
      EXPECT_NO_THROW(block.block().check()) << "thrown once";
    }
    ++repeat;
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(comm.timeout_ms()));
    for (bool const halves : {true, false}) {
      block.bring(7);
      block.launch(33, halves);
      EXPECT_EQ(block.result(33), want);
    }
  }
}

TEST(DualBatch, N12_ExpertsThatThrowEndBothHalves) {
  comm::Mpi host(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  comm::Nccl comm = comm::Nccl::over_communicator(host, {.timeout_ms = 5'000});
  experts_fail<backends::HighThroughput<Window>, experts::HopperContiguous>(host, comm);
  experts_fail<backends::LowLatency<Window>, experts::HopperMasked>(host, comm);
  experts_fail<backends::LowLatencyRankMajor<Window>, experts::HopperContiguous>(host, comm);
}

/// A step of two ranks: what each votes, and what all of them do.
struct Step {
  std::array<StepVote, 2> votes;
  bool halves;
  std::array<std::int32_t, 2> rows;
};

/// The votes travel over `host`; then every rank runs the rows of the decision, those past its own as padding.
template <class Backend, class Experts>
void vote(comm::Mpi& host, comm::Nccl& comm) {
  constexpr std::int32_t kLeast = 32;  // rows from which a rank wants halves
  auto const rows = [](std::int32_t own, std::int32_t graph_mode = 0) { return StepVote{own, own, own >= kLeast, graph_mode}; };
  StepVote refuses = rows(40);
  refuses.wants_ubatch = false;
  std::array<Step, 8> const steps{{{{rows(40), rows(40)}, true, {40, 40}},
                                   {{rows(40), rows(33)}, true, {40, 40}},        // uneven: padded to the largest
                                   {{rows(33), rows(64)}, true, {64, 64}},        // the second half of rank 0 has one row of its own
                                   {{rows(32), rows(64)}, false, {32, 64}},       // and here it would have none
                                   {{rows(40), refuses}, false, {40, 40}},        // one rank votes no
                                   {{rows(31), rows(40)}, false, {31, 40}},       // one rank has too few rows
                                   {{rows(40, 1), rows(3, 1)}, false, {40, 40}},  // as in a graph: padded, whole
                                   {{rows(0), rows(40)}, false, {0, 40}}}};       // an idle rank
  DualBlock<Backend, Experts> block(comm, {}, 0);
  auto const me = static_cast<std::size_t>(comm.rank());
  auto const everywhere = [&](bool halves) {  // how many ranks ran the batch in halves
    std::vector<char> ran(2);
    char const mine = halves ? 1 : 0;
    host.all_gather(&mine, 1, ran.data(), {});
    return std::count(ran.begin(), ran.end(), 1);
  };
  for (std::size_t s = 0; s < steps.size(); ++s) {
    SCOPED_TRACE(text(Backend::kName, ", step ", s));
    std::int32_t const own = steps[s].votes[me].unpadded;
    StepDecision const decision = decide_step_over(host, steps[s].votes[me]);
    ASSERT_EQ(decision.ubatch, steps[s].halves);
    ASSERT_EQ(decision.num_tokens, std::vector<std::int32_t>(steps[s].rows.begin(), steps[s].rows.end()));
    std::int64_t const run = decision.num_tokens[me];
    int const seed = static_cast<int>(s) + 1;
    block.bring(seed);
    block.block().decide_dual_batch(false);
    EXPECT_EQ(everywhere(block.forward(run, own, block.stream())), 0);
    auto const want = block.result(own);
    block.bring(seed);
    block.block().decide_dual_batch(decision.ubatch);
    EXPECT_EQ(everywhere(block.forward(run, own, block.stream())), steps[s].halves ? 2 : 0);
    EXPECT_EQ(block.result(own), want);
  }
  // Without a verdict each rank goes by its own rows, which are on one side of min_rows, 2, on all ranks.
  block.block().decide_dual_batch(std::nullopt);
  for (std::array<std::int64_t, 2> const counts : {std::array<std::int64_t, 2>{40, 33}, {2, 300}, {1, 0}, {1, 1}}) {
    SCOPED_TRACE(text(Backend::kName, ", ", counts[0], " and ", counts[1], " rows, no verdict"));
    bool const halves = std::min(counts[0], counts[1]) >= 2;
    block.bring(20);
    block.launch(counts[me], false);
    auto const want = block.result(counts[me]);
    block.bring(20);
    block.block().decide_dual_batch(std::nullopt);
    EXPECT_EQ(everywhere(block.forward(counts[me], -1, block.stream())), halves ? 2 : 0);
    EXPECT_EQ(block.result(counts[me]), want);
  }
}

TEST(DualBatch, N13_AllRanksSplitOrNone) {
  comm::Mpi host(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  comm::Nccl comm = comm::Nccl::over_communicator(host, {.timeout_ms = 5'000});
  vote<backends::HighThroughput<Window>, experts::HopperContiguous>(host, comm);
  vote<backends::LowLatency<Window>, experts::HopperMasked>(host, comm);
  vote<backends::LowLatencyRankMajor<Window>, experts::HopperContiguous>(host, comm);
  vote<backends::Pplx<Window>, experts::HopperMasked>(host, comm);
}

}  // namespace
