// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_row_scales_test.cu: the Hopper layer in the schemes with one scale per row of the intermediate, whose rows any warpgroup
// may quantise: few and many tiles, rows that a warp holds and longer ones, experts without rows, batches, repeated calls. One thread block
// quantises every row itself; more of them share the rows, and must give the same bits.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "hopper_reference.cuh"
#include "moe/experts/hopper/contiguous_layer.hpp"
#include "on_hopper.hpp"

namespace {

using namespace moe::hopper;
using namespace moe_test;

std::size_t bytes_of(LocalShape const& shape, int tokens) { return static_cast<std::size_t>(tokens) * shape.hidden * 2; }

class HopperRowScales : public testing::TestWithParam<Scheme> {
 protected:
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }

  static ContiguousLayer layer_of(Problem const& problem, int workers) {
    LayerOptions options{};
    options.workers = workers;
    return {problem.shape, problem.scheme, problem.layer_weights(), options};
  }

  /// The output of one call with poisoned memory. K is not cut: the order of fp8's sums would depend on the multiprocessors.
  static std::vector<char> output(Problem const& problem, int tokens, int workers, int tile_rows, bool self_align) {
    ContiguousLayer const layer = layer_of(problem, workers);
    TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(tokens)));
    TypedMemory<char> const out(bytes_of(problem.shape, tokens));
    workspace.fill_bytes(0xFF);
    out.fill_bytes(0xFF);
    Tuning tuning{};
    tuning.tile_rows = tile_rows;
    tuning.max_splits = 1;
    tuning.self_align = self_align;
    LayerCall call = problem.call(out.data());
    call.max_tokens = tokens;
    layer.forward(call, tuning, workspace.data(), nullptr);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    if (workers == 1) {
      EXPECT_LT(compare(problem, out.data(), 16, tokens).relative, tolerance(problem.scheme, tokens))
          << "I " << problem.shape.intermediate << ", " << tokens << " tokens, tiles of " << tile_rows;
    }
    return out.download();
  }

  /// Any number of multiprocessors gives the bits that one gives, which are right.
  static void check(LocalShape shape, Scheme scheme, int tokens, Pattern pattern, std::vector<int> const& tiles, bool self_align) {
    Problem const problem(shape, scheme, tokens, pattern, 300 + static_cast<std::uint64_t>(tokens));
    for (int tile_rows : tiles) {
      std::vector<char> const alone = output(problem, tokens, 1, tile_rows, self_align);
      for (int workers : {2, 17, 0}) {
        EXPECT_TRUE(output(problem, tokens, workers, tile_rows, self_align) == alone)
            << workers << " workers, I " << shape.intermediate << ", " << tokens << " tokens, tiles of " << tile_rows << ", pattern "
            << static_cast<int>(pattern);
      }
    }
  }
};

/// The case for compute-sanitizer: two tiles or four, four weight tiles of GEMM2, rows just too long for a warp and rows of one warp.
TEST_P(HopperRowScales, Small) {
  for (int intermediate : {2064, 208}) {
    for (bool self_align : {false, true}) check({2, 1024, intermediate, 1}, GetParam(), 24, Pattern::random, {8, 16}, self_align);
  }
}

TEST_P(HopperRowScales, FewTilesOfLongRows) {
  for (int intermediate : {2064, 8208, 14352}) {  // a warpgroup holds 4096 columns of int8 at a time, 8192 of fp8
    LocalShape const shape{2, 4096, intermediate, 1};
    check(shape, GetParam(), 1, Pattern::random, {8}, true);
    check(shape, GetParam(), 11, Pattern::one_expert, {8, 16}, true);
    check(shape, GetParam(), 131, Pattern::random, {64, most_rows(GetParam())}, false);
  }
}

/// Batches of 64, 32, 8 and 4 rows in int8, of up to 32 in fp8, that do not divide a tile's rows.
TEST_P(HopperRowScales, ShortRowsAndExpertsWithoutRows) {
  for (int intermediate : {80, 208, 768, 2048}) {
    LocalShape const shape{8, 1024, intermediate, 2};
    for (Pattern pattern : {Pattern::random, Pattern::one_expert, Pattern::some_missing, Pattern::few_experts, Pattern::all_missing}) {
      check(shape, GetParam(), 37, pattern, {16, 64}, true);
      check(shape, GetParam(), 333, pattern, {64, most_rows(GetParam())}, false);
    }
  }
}

TEST_P(HopperRowScales, ManyTiles) {
  check({64, 512, 272, 4}, GetParam(), 1200, Pattern::random, {8, 64}, false);
  check({16, 512, 2320, 4}, GetParam(), 700, Pattern::random, {8, most_rows(GetParam())}, false);
}

/// Calls one after the other, in a graph, find the counters at zero again.
TEST_P(HopperRowScales, CallsInAGraphRepeat) {
  LocalShape const shape{4, 2048, 2064, 2};
  for (int tokens : {3, 60}) {
    Problem const problem(shape, GetParam(), tokens, Pattern::random, 71);
    ContiguousLayer const layer = layer_of(problem, 0);
    TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(tokens)));
    TypedMemory<char> const out(bytes_of(shape, tokens));
    for (bool self_align : {false, true}) {
      Tuning tuning{};
      tuning.tile_rows = 16;
      tuning.max_splits = 1;
      tuning.self_align = self_align;
      cudaStream_t stream = nullptr;
      cudaGraph_t graph = nullptr;
      cudaGraphExec_t exec = nullptr;
      ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
      workspace.fill_bytes(0xFF);
      layer.forward(problem.call(out.data()), tuning, workspace.data(), stream);  // outside the capture first: modules load here
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      EXPECT_LT(compare(problem, out.data(), 16).relative, tolerance(GetParam(), tokens)) << tokens << " tokens";
      std::vector<char> const first = out.download();
      ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
      for (int call = 0; call < 3; ++call) layer.forward(problem.call(out.data()), tuning, workspace.data(), stream);
      ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
      ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
      for (int launch = 0; launch < 20; ++launch) {
        workspace.fill_bytes(0xFF);
        out.fill_bytes(0xFF);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
        ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        ASSERT_TRUE(out.download() == first) << "launch " << launch << ", " << tokens << " tokens, self_align " << self_align;
      }
      cudaGraphExecDestroy(exec);
      cudaGraphDestroy(graph);
      cudaStreamDestroy(stream);
    }
  }
}

/// Batched rows, an expert without any among them: those of long intermediate rows equal the reference, from any number of multiprocessors.
TEST_P(HopperRowScales, BatchesOfLongRows) {
  constexpr int kCapacity = 72;
  LocalShape const shape{4, 1024, 2320, 1};
  int const slots = shape.num_experts * kCapacity;
  std::vector<std::int32_t> const counts{0, 1, 33, kCapacity};
  Problem const problem(shape, GetParam(), slots, Pattern::random, 19);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(slots), -1);
  std::vector<int> valid;
  for (int e = 0; e < shape.num_experts; ++e) {
    for (int r = 0; r < counts[static_cast<std::size_t>(e)]; ++r) {
      valid.push_back(e * kCapacity + r);
      ids[static_cast<std::size_t>(valid.back())] = e;
    }
  }
  problem.ids.upload(ids);
  problem.weights.upload(std::vector<float>(static_cast<std::size_t>(slots), 1.0F));
  TypedMemory<std::int32_t> const device_counts(counts.size());
  device_counts.upload(counts);
  for (int workers : {1, 0}) {
    ContiguousLayer const layer = layer_of(problem, workers);
    TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(slots)));
    TypedMemory<char> const out(bytes_of(shape, slots));
    for (int expected : {1, 33, kCapacity}) {
      workspace.fill_bytes(0xFF);
      out.fill_bytes(0xFF);
      layer.forward_batched(problem.x.data(), device_counts.data(), kCapacity, expected, out.data(), workspace.data(), nullptr,
                            problem.x_scales.data());
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      EXPECT_LT(compare(problem, out.data(), valid).relative, tolerance(GetParam(), slots))
          << workers << " workers, expected rows " << expected;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Schemes, HopperRowScales, testing::Values(Scheme::fp8_row, Scheme::int8_row),
                         [](auto const& info) { return std::string(name(info.param)); });

}  // namespace
