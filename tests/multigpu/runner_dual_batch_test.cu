// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_dual_batch_test.cu: between GPUs, a block in two halves has the bits of the whole batch over every backend that can
// send and wait apart, called and in graphs; a rank's error ends both halves, and the next forward works.
// moe-ranks: 2
#include <mpi.h>

#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/backends/window/device/pplx/exchange.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
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

}  // namespace
