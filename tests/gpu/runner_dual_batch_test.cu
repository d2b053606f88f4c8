// SPDX-License-Identifier: Apache-2.0
// tests/gpu/runner_dual_batch_test.cu: on one rank, a block in two halves has the bits of the whole batch, also in a graph; an error is
// thrown once, by the call, also while a graph is captured; a forward allocates nothing and waits for nothing, wait() for its stream.
// Between ranks: tests/multigpu/runner_dual_batch_test.cu.
#include <algorithm>
#include <chrono>
#include <thread>

#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/comm/simulated_peers.hpp"
#include "moe/core/stream_capture.hpp"
#include "tests/gpu/dual_batch_block.cuh"
#include "tests/gpu/forward_costs.cuh"

namespace {

using namespace moe_test;
using Window = comm::SimulatedWindow;

template <class Backend, class Experts>
void one_rank(int workers) {
  comm::SimulatedGroup group(1);
  comm::SimulatedRank rank(group, 0);
  DualBlock<Backend, Experts> block(rank, {}, workers);
  for (std::int64_t const rows : {300, 17, 2, 1, 0}) block.expect_same_bits(rows);

  block.bring(7);
  block.launch(32, false);
  auto const want = block.result(32);
  for (int repeat = 0; repeat < 3; ++repeat) {
    expect_error(ErrorCode::capacity, "301 rows exceed", [&] { block.launch(301, true); });
    check_cuda(cudaStreamSynchronize(block.stream()), "cudaStreamSynchronize");
    EXPECT_NO_THROW(block.block().check()) << "the caller has had the error";
    block.bring(7);
    block.launch(32, true);
    EXPECT_EQ(block.result(32), want);
  }
}

TEST(DualBatchOnOneRank, SameBits) {
  one_rank<backends::HighThroughput<Window>, experts::HopperContiguous>(0);
  one_rank<backends::HighThroughput<Window>, experts::HopperContiguous>(100);
  one_rank<backends::LowLatency<Window>, experts::HopperMasked>(0);
}

template <class Backend, class Experts>
void enqueues_only() {
  comm::SimulatedGroup group(1);
  comm::SimulatedRank rank(group, 0);
  DualBlock<Backend, Experts> block(rank, {}, 0);
  block.bring(1);
  for (bool const halves : {false, true}) {
    std::string const name = text(Backend::kName, halves ? ", a block in halves" : ", a block");
    expect_enqueues_only(block.stream(), name.c_str(), [&] { block.launch(128, halves); });
  }
  block.result(128);
}

TEST(DualBatchOnOneRank, EnqueuesOnly) {
  enqueues_only<backends::HighThroughput<Window>, experts::HopperContiguous>();
  enqueues_only<backends::LowLatency<Window>, experts::HopperMasked>();
}

/// Experts of either half, or of a whole batch, throw: the call throws it, nothing stays open, and the next forward works.
template <class Backend, class Experts>
void experts_fail() {
  comm::SimulatedGroup group(1);
  comm::SimulatedRank rank(group, 0);
  DualBlock<Backend, FailingExperts<Experts>> block(rank, {}, 0);
  block.bring(7);
  block.launch(33, false);
  auto const want = block.result(33);
  for (int const call : {1, 2, 0, 1, 1, 2}) {  // 0: the call of a whole batch
    SCOPED_TRACE(text(Backend::kName, ", call ", call));
    FailingCall::fails_on = std::max(call, 1);
    expect_error(ErrorCode::internal, "experts: injected", [&] { block.launch(33, call > 0); });
    EXPECT_EQ(FailingCall::fails_on, 0);
    check_cuda(cudaStreamSynchronize(block.stream()), "cudaStreamSynchronize");
    EXPECT_NO_THROW(block.block().check()) << "the caller has had the error";
    for (bool const halves : {true, false}) {
      block.bring(7);
      block.launch(33, halves);
      EXPECT_EQ(block.result(33), want);
    }
  }
}

TEST(DualBatchOnOneRank, N12_ExpertsThatThrowEndBothHalves) {
  experts_fail<backends::HighThroughput<Window>, experts::HopperContiguous>();
  experts_fail<backends::LowLatency<Window>, experts::HopperMasked>();
}

/// Experts throw while a forward is captured, with the communication queue forked and, with overlap_rows, the shared experts' side stream
/// too: the capture throws it and has ended, nothing of it runs, and the next forwards work, called, captured and replayed.
template <class Backend, class Experts>
void experts_fail_in_a_capture(std::int64_t overlap_rows) {
  comm::SimulatedGroup group(1);
  comm::SimulatedRank rank(group, 0);
  DualBlock<Backend, FailingExperts<Experts>> block(rank, {}, 0, 0, overlap_rows);
  constexpr std::int64_t kRows = 33;
  block.bring(7);
  block.launch(kRows, true);  // kernels are loaded
  block.result(kRows);
  block.bring(7);
  block.launch(kRows, false);
  auto const want = block.result(kRows);
  for (int const call : {1, 2, 0, 1, 1, 2}) {  // 0: the call of a whole batch
    SCOPED_TRACE(text(Backend::kName, ", call ", call, ", shared experts beside up to ", overlap_rows, " rows"));
    bool const halves = call > 0;
    block.bring(7);
    FailingCall::fails_on = std::max(call, 1);
    expect_error(ErrorCode::internal, "experts: injected",
                 [&] { CudaGraph const graph(block.stream(), [&] { block.launch(kRows, halves); }); });
    EXPECT_EQ(FailingCall::fails_on, 0);
    EXPECT_FALSE(StreamCapture<space::cuda>::is_active(block.stream()));
    EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess) << "the next launch would report it";
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    EXPECT_NO_THROW(block.block().check()) << "the caller has had the error";
    std::vector<bf16> left(static_cast<std::size_t>(kRows * block.kHidden));
    Memory<space::cuda>::copy_to_host(left.data(), block.output(), left.size() * sizeof(bf16));
    EXPECT_TRUE(std::all_of(left.begin(), left.end(), [](bf16 v) { return std::isnan(to_float(v)); })) << "something ran";

    for (bool const again : {halves, !halves}) {
      block.bring(7);
      block.launch(kRows, again);
      EXPECT_EQ(block.result(kRows), want) << "called";
    }
    CudaGraph const graph(block.stream(), [&] { block.launch(kRows, halves); });
    for (int replay = 0; replay < 2; ++replay) {
      block.bring(7);
      graph.launch(block.stream());
      EXPECT_EQ(block.result(kRows), want) << "replayed";
    }
  }
}

TEST(DualBatchOnOneRank, N12_ExpertsThatThrowInACapture) {
  for (std::int64_t const overlap_rows : {0, 300}) {
    experts_fail_in_a_capture<backends::HighThroughput<Window>, experts::HopperContiguous>(overlap_rows);
    experts_fail_in_a_capture<backends::LowLatency<Window>, experts::HopperMasked>(overlap_rows);
  }
}

/// wait(stream) returns once the stream has finished, although the exchange has no wait of its own.
template <class Backend, class Experts>
void waits_for_the_stream() {
  comm::SimulatedGroup group(1);
  comm::SimulatedRank rank(group, 0);
  DualBlock<Backend, Experts> block(rank, {}, 0);
  for (bool const halves : {false, true}) {
    block.bring(1);
    block.launch(32, halves);
    auto const sleep = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
    check_cuda(cudaLaunchHostFunc(block.stream(), sleep, nullptr), "cudaLaunchHostFunc");
    block.block().wait(block.stream());
    EXPECT_EQ(cudaStreamQuery(block.stream()), cudaSuccess) << Backend::kName << (halves ? ", in halves" : "");
    block.result(32);
  }
}

TEST(DualBatchOnOneRank, WaitsForTheStream) {
  waits_for_the_stream<backends::HighThroughput<Window>, experts::HopperContiguous>();
  waits_for_the_stream<backends::LowLatency<Window>, experts::HopperMasked>();
}

}  // namespace
