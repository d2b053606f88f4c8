// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/eplb_runtime_test.cu: experts move between GPUs over NCCL, beside layers that serve over windows and over NCCL.
// moe-ranks: 2 4
#include <gtest/gtest.h>
#include <mpi.h>

#include "moe/backends/collective/device/all_to_all_v.cuh"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/routing/device/route.cuh"
#include "tests/gpu/eplb_device_serving.hpp"

namespace {

using namespace moe_test;
using Window = comm::NcclSymmetric;

template <class Quant, class Backend, class Experts>
void between_gpus() {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  comm::Mpi host(MPI_COMM_WORLD, {.timeout_ms = 40'000});
  eplb::CommGroup<comm::Mpi> group(host);
  comm::Nccl tokens = comm::Nccl::over_communicator(host, {.timeout_ms = 20'000});
  comm::Nccl weights = comm::Nccl::over_communicator(host, {.timeout_ms = 20'000});
  for (MoveMode mode : {MoveMode::pause, MoveMode::background}) {
    expect_same_while_moving<Quant, Backend, Experts>(tokens, weights, group, mode, false);
  }
}

TEST(EplbRuntime, TheWorkerNeedsAStreamOfItsOwn) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  comm::Mpi host(MPI_COMM_WORLD, {.timeout_ms = 40'000});
  comm::Nccl weights = comm::Nccl::over_communicator(host, {.timeout_ms = 20'000});
  eplb::WeightMover<comm::Nccl> mover(weights, {}, 1);
  try {
    eplb::AsyncRearrangement<comm::Nccl> const refused(mover);
    ADD_FAILURE() << "the default stream was accepted";
  } catch (Error const& e) {
    EXPECT_EQ(e.code(), ErrorCode::argument);
    EXPECT_NE(e.message().find("worker_stream"), std::string::npos) << e.message();
  }
}
TEST(EplbRuntime, LowLatencyHopperMasked) { between_gpus<quantization::Fp8Block<>, backends::LowLatency<Window>, experts::HopperMasked>(); }
TEST(EplbRuntime, HighThroughputHopperContiguous) {
  between_gpus<quantization::Fp8Block<>, backends::HighThroughput<Window>, experts::HopperContiguous>();
}
TEST(EplbRuntime, AllToAllVHopperW4A16PacksAgain) {
  between_gpus<quantization::Int4Group128, backends::AllToAllV<comm::Nccl>, experts::HopperW4A16>();
}

}  // namespace
