// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_contiguous_test.cu: the Hopper layer against float32 by definition, poisoned workspaces, edge cases, graph replay.
// sm_90a
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <random>
#include <tuple>

#include "hopper_reference.cuh"
#include "moe/experts/hopper/contiguous_layer.hpp"
#include "on_hopper.hpp"

namespace {

using namespace moe::hopper;
using namespace moe_test;

constexpr LocalShape kTiny{8, 256, 256, 2};
constexpr LocalShape kOdd{16, 384, 128, 4};
constexpr LocalShape kOneSlot{4, 512, 256, 1};
constexpr LocalShape kQwen3_30b{128, 2048, 768, 8};
constexpr LocalShape kDeepseekRank{32, 7168, 2048, 1};
constexpr LocalShape kGptOss{128, 2880, 2880, 4};

class Hopper : public testing::TestWithParam<Scheme> {
 protected:
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }

  /// Twice with poisoned workspace and output: right, and the same bits.
  void check(LocalShape shape, int tokens, Pattern pattern, Tuning const* tuning = nullptr) {
    Scheme const scheme = GetParam();
    Problem const problem(shape, scheme, tokens, pattern, seed_ += 17);
    ContiguousLayer const layer(shape, scheme, problem.layer_weights());
    TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(tokens)));
    TypedMemory<char> const out(static_cast<std::size_t>(tokens) * shape.hidden * 2);
    std::vector<char> first;
    for (int repeat = 0; repeat < 2; ++repeat) {
      workspace.fill_bytes(0xFF);
      out.fill_bytes(0xFF);
      layer.forward(problem.call(out.data()), tuning != nullptr ? *tuning : choose_tuning(shape, scheme, tokens), workspace.data(),
                    nullptr);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      if (repeat == 0) {
        first = out.download();
        EXPECT_LT(compare(problem, out.data(), 128).relative, tolerance(scheme, tokens)) << "tokens " << tokens;
      } else {
        EXPECT_TRUE(first == out.download()) << "not repeatable at tokens " << tokens;
      }
    }
  }

  std::uint64_t seed_ = 1000;
};

TEST_P(Hopper, X3_TokenCounts) {
  for (int tokens : {1, 2, 7, 8, 9, 33, 64, 129, 222, 1024, 4096}) check(kTiny, tokens, Pattern::random);
}

TEST_P(Hopper, X5_OneExpertSomeAndAllMissing) {
  for (Pattern pattern : {Pattern::one_expert, Pattern::some_missing, Pattern::all_missing, Pattern::few_experts}) {
    for (int tokens : {1, 8, 40, 700}) check(kOdd, tokens, pattern);
    for (int tokens : {1, 300}) check(kOneSlot, tokens, pattern);
  }
}

TEST_P(Hopper, TilesOfEverySize) {
  for (int rows : {24, 40, 56}) {  // of one expert: K would be split into parts with more columns than the tile has rows
    Tuning tuning{};
    tuning.tile_rows = rows;
    check({1, 2048, 256, 1}, rows, Pattern::random, &tuning);
  }
  for (int rows : {8, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160}) {
    for (int cluster : {1, 2}) {
      Tuning tuning{};
      tuning.tile_rows = rows;
      tuning.cluster = cluster;
      check(kTiny, 500, Pattern::random, &tuning);
    }
  }
}

TEST_P(Hopper, TilesFilledToEveryWidth) {
  constexpr LocalShape kLongRows{2, 512, 1024, 1};
  for (int tokens = 4; tokens <= 164; tokens += 8) {
    Tuning tuning{};
    tuning.tile_rows = 160;
    check(kLongRows, tokens, Pattern::one_expert, &tuning);
  }
}

// Eight steps of K and several units per thread block: racecheck must see the ring wrap.
TEST_P(Hopper, RingsOfBuffersWrap) {
  constexpr LocalShape kDeep{8, 1024, 256, 2};
  for (int rows : {8, 64, most_rows(GetParam()), kBlockRows}) {
    for (int cluster : {1, 2}) {
      Tuning tuning{};
      tuning.tile_rows = rows;
      tuning.cluster = cluster;
      check(kDeep, 500, Pattern::random, &tuning);
    }
  }
}

TEST_P(Hopper, ModelShapes) {
  for (int tokens : {1, 64, 1000}) check(kQwen3_30b, tokens, Pattern::random);
  for (int tokens : {1, 3000}) check(kDeepseekRank, tokens, Pattern::random);
  if (!is_fp8(GetParam())) check(kGptOss, 37, Pattern::random);
}

TEST_P(Hopper, NoTokensLaunchesNothing) {
  Problem const problem(kTiny, GetParam(), 1, Pattern::random, 5);
  ContiguousLayer const layer(kTiny, GetParam(), problem.layer_weights());
  TypedMemory<char> const memory(1 << 20);
  LayerCall call = problem.call(memory.data());
  call.max_tokens = 0;
  layer.forward(call, memory.data(), nullptr);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST_P(Hopper, X19_GraphReplayFollowsDeviceTokenCount) {
  constexpr int kMost = 300;
  Problem const problem(kTiny, GetParam(), kMost, Pattern::random, 77);
  ContiguousLayer const layer(kTiny, GetParam(), problem.layer_weights());
  TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(kMost)));
  TypedMemory<char> const out(static_cast<std::size_t>(kMost) * kTiny.hidden * 2);
  TypedMemory<std::int32_t> const count(1);
  LayerCall call = problem.call(out.data());
  call.num_tokens = count.data();
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  count.upload({kMost});
  layer.forward(call, workspace.data(), stream);  // outside the capture first: modules load here
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  layer.forward(call, workspace.data(), stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  std::vector<std::uint16_t> whole;
  for (int tokens : {kMost, 0, 1, 131}) {
    count.upload({tokens});
    out.fill_bytes(0xFF);
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    std::vector<char> const bytes = out.download();
    if (tokens == kMost) {
      EXPECT_LT(compare(problem, out.data(), 64).relative, tolerance(GetParam(), tokens));
    }
    for (std::size_t i = static_cast<std::size_t>(tokens) * kTiny.hidden * 2; i < bytes.size(); ++i) {
      ASSERT_EQ(bytes[i], '\xFF') << "a row past the count was written, count " << tokens;
    }
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_P(Hopper, X6_BatchedRowsPastTheCountAreNeitherReadNorWritten) {
  constexpr int kCapacity = 96;
  LocalShape const shape{8, 512, 256, 1};
  int const tokens = shape.num_experts * kCapacity;
  Problem const problem(shape, GetParam(), tokens, Pattern::random, 91);
  std::vector<std::int32_t> const counts{0, 1, 7, 8, 33, 64, 95, 96};
  std::vector<std::int32_t> ids(static_cast<std::size_t>(tokens), -1);
  std::vector<int> valid;
  std::vector<float> const ones(static_cast<std::size_t>(tokens), 1.0F);
  for (int e = 0; e < shape.num_experts; ++e) {
    for (int r = 0; r < counts[static_cast<std::size_t>(e)]; ++r) {
      ids[static_cast<std::size_t>(e * kCapacity + r)] = e;
      valid.push_back(e * kCapacity + r);
    }
  }
  problem.ids.upload(ids);
  problem.weights.upload(ones);
  for (int e = 0; e < shape.num_experts; ++e) {  // NaN in the rows that must not be read
    int const count = counts[static_cast<std::size_t>(e)];
    std::size_t const row_bytes = static_cast<std::size_t>(shape.hidden) * (is_row_scaled(GetParam()) ? 1 : 2);
    ASSERT_EQ(cudaMemset(problem.x.data() + static_cast<std::size_t>(e * kCapacity + count) * row_bytes, 0xFF,
                         static_cast<std::size_t>(kCapacity - count) * row_bytes),
              cudaSuccess);
    if (is_row_scaled(GetParam())) {  // no code of int8 is NaN
      ASSERT_EQ(cudaMemset(problem.x_scales.data() + e * kCapacity + count, 0xFF, static_cast<std::size_t>(kCapacity - count) * 4),
                cudaSuccess);
    }
  }
  ContiguousLayer const layer(shape, GetParam(), problem.layer_weights());
  TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(tokens)));
  TypedMemory<char> const out(static_cast<std::size_t>(tokens) * shape.hidden * 2);
  TypedMemory<std::int32_t> const device_counts(counts.size());
  device_counts.upload(counts);
  for (int expected : {1, 16, 64, kCapacity}) {
    workspace.fill_bytes(0xFF);
    out.fill_bytes(0xFF);
    layer.forward_batched(problem.x.data(), device_counts.data(), kCapacity, expected, out.data(), workspace.data(), nullptr,
                          problem.x_scales.data());
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_LT(compare(problem, out.data(), valid).relative, tolerance(GetParam(), tokens)) << "expected rows " << expected;
  }
}

TEST_P(Hopper, BatchesGatherTheirRows) {
  constexpr int kCapacity = 40, kRows = 64;
  if (GetParam() == Scheme::fp8_block) GTEST_SKIP() << "gathers rows that are quantised already: hopper_masked_test";
  LocalShape const shape{4, 256, 128, 1};
  int const places = shape.num_experts * kCapacity;
  Problem const packed(shape, GetParam(), places, Pattern::random, 17);
  ContiguousLayer const layer(shape, GetParam(), packed.layer_weights());
  std::vector<std::int32_t> const counts{40, 0, 7, 33};
  std::vector<std::int32_t> gather(static_cast<std::size_t>(places), 1 << 30);  // places past a count are not read
  for (int e = 0; e < shape.num_experts; ++e) {
    for (int i = 0; i < counts[static_cast<std::size_t>(e)]; ++i)
      gather[static_cast<std::size_t>(e * kCapacity + i)] = (7 * e + 5 * i) % kRows;
  }
  std::size_t const row = static_cast<std::size_t>(shape.hidden) * element_bytes(GetParam());
  TypedMemory<char> const x(static_cast<std::size_t>(places) * row);
  TypedMemory<float> const scales(static_cast<std::size_t>(places));
  scales.fill_bytes(0);
  for (std::size_t i = 0; i < gather.size(); ++i) {
    if (gather[i] == 1 << 30) continue;
    auto const from = static_cast<std::size_t>(gather[i]);
    ASSERT_EQ(cudaMemcpy(x.data() + i * row, packed.x.data() + from * row, row, cudaMemcpyDeviceToDevice), cudaSuccess);
    if (is_scaled(GetParam())) {
      ASSERT_EQ(cudaMemcpy(scales.data() + i, packed.x_scales.data() + from, 4, cudaMemcpyDeviceToDevice), cudaSuccess);
    }
  }
  TypedMemory<std::int32_t> const device_counts(counts.size()), device_gather(gather.size());
  device_counts.upload(counts);
  device_gather.upload(gather);
  TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(places)));
  TypedMemory<char> const in_place(static_cast<std::size_t>(places) * shape.hidden * 2), gathered(in_place.size());
  in_place.fill_bytes(0xFF);
  gathered.fill_bytes(0xFF);
  layer.forward_batched(x.data(), device_counts.data(), kCapacity, 16, in_place.data(), workspace.data(), nullptr, scales.data());
  layer.forward_batched(packed.x.data(), device_counts.data(), kCapacity, 16, gathered.data(), workspace.data(), nullptr,
                        packed.x_scales.data(), device_gather.data());
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(gathered.download() == in_place.download());
}

/// Tiles of 128 rows read codes in the sorted order: copied from separate quantised rows, or quantised from the same rows while gathering.
TEST(HopperBlocks, RowsThatComeQuantisedGiveTheSameBits) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  constexpr std::size_t kGap = 64, kScaleGap = 3;
  struct Case {
    LocalShape shape;
    int tokens;
    int count;  ///< of the tokens that are there
    Pattern pattern;
  };
  for (Case const& c : {Case{kTiny, 2000, 2000, Pattern::random}, Case{kTiny, 2000, 1501, Pattern::some_missing},
                        Case{kOdd, 900, 900, Pattern::all_missing}, Case{kOneSlot, 700, 0, Pattern::random},
                        Case{{64, 256, 128, 40}, 300, 299, Pattern::random}, Case{kDeepseekRank, 3000, 2999, Pattern::some_missing}}) {
    LocalShape const& s = c.shape;
    Features given;
    given.quantized_x = true;
    Problem const wide(s, Scheme::fp8_block, c.tokens, c.pattern, 31);
    Problem const codes(s, Scheme::fp8_block, c.tokens, c.pattern, 31, given);
    ContiguousLayer const layer(s, Scheme::fp8_block, wide.layer_weights());
    auto const rows = static_cast<std::size_t>(c.tokens), width = static_cast<std::size_t>(s.hidden), blocks = width / 128;
    TypedMemory<char> const apart(rows * (width + kGap));
    TypedMemory<float> const scales(rows * (blocks + kScaleGap));
    apart.fill_bytes(0xFF);
    scales.fill_bytes(0xFF);
    ASSERT_EQ(cudaMemcpy2D(apart.data(), width + kGap, codes.x.data(), width, width, rows, cudaMemcpyDeviceToDevice), cudaSuccess);
    ASSERT_EQ(cudaMemcpy2D(scales.data(), (blocks + kScaleGap) * 4, codes.x_scales.data(), blocks * 4, blocks * 4, rows,
                           cudaMemcpyDeviceToDevice),
              cudaSuccess);
    TypedMemory<std::int32_t> const count(1);
    count.upload({c.count});
    TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(c.tokens)));
    TypedMemory<char> const out(rows * width * 2);
    std::vector<char> results[2];
    for (bool quantised : {false, true}) {
      workspace.fill_bytes(0xFF);
      out.fill_bytes(0xFF);
      LayerCall call = wide.call(out.data());
      call.num_tokens = count.data();
      if (quantised) {
        call.x = apart.data();
        call.x_stride = static_cast<std::int64_t>(width + kGap);
        call.x_scales = scales.data();
        call.x_scale_stride = static_cast<std::int64_t>(blocks + kScaleGap);
      }
      Tuning const tuning = choose_tuning(s, Scheme::fp8_block, c.tokens, !quantised);
      ASSERT_EQ(tuning.tile_rows, kBlockRows);
      layer.forward(call, tuning, workspace.data(), nullptr);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      results[quantised ? 1 : 0] = out.download();
    }
    EXPECT_TRUE(results[0] == results[1]) << "E " << s.num_experts << " H " << s.hidden << " k " << s.topk << ", " << c.tokens << " tokens";
    if (c.count == c.tokens) EXPECT_LT(compare(codes, out.data(), 128).relative, tolerance(Scheme::fp8_block, c.tokens));
  }
}

/// Few bf16 rows, which either the layer kernel quantises as it loads them, or the aligning kernel before it.
TEST(HopperSmallCalls, RowsQuantisedOnTheWayGiveTheSameBits) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  struct Case {
    LocalShape shape;
    std::vector<int> tokens;
    Pattern pattern;
  };
  constexpr LocalShape kLongRows{16, 7168, 256, 8}, kShortRows{16, 256, 128, 8}, kOneGroup{8, 128, 128, 8}, kSevenGroups{4, 896, 384, 1};
  for (Case const& c : {Case{kLongRows, {1, 2, 3, 4, 5, 6, 7, 8}, Pattern::random}, Case{kLongRows, {5, 16}, Pattern::one_expert},
                        Case{kLongRows, {2, 16}, Pattern::some_missing}, Case{kShortRows, {1, 2, 3, 4, 5, 6, 7, 8, 16}, Pattern::random},
                        Case{kShortRows, {7, 16}, Pattern::some_missing}, Case{kShortRows, {8}, Pattern::all_missing},
                        Case{kOneGroup, {1, 8, 16}, Pattern::one_expert}, Case{kSevenGroups, {1, 12, 13, 100, 128}, Pattern::one_expert},
                        Case{kSevenGroups, {33, 128}, Pattern::some_missing}, Case{kDeepseekRank, {1, 8, 16}, Pattern::random}}) {
    LocalShape const& s = c.shape;
    int const most = c.tokens.back();
    Problem const problem(s, Scheme::fp8_block, most, c.pattern, 51);
    ASSERT_EQ(cudaMemset(problem.x.data(), 0, 256), cudaSuccess);  // one group of zeros
    ContiguousLayer const layer(s, Scheme::fp8_block, problem.layer_weights());
    TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(most)));
    auto const wide = static_cast<std::size_t>(s.topk) + 3;  // rows of ids and weights, with an expert that exists in the gaps
    std::vector<std::int32_t> const ids = problem.ids.download();
    std::vector<float> const weights = problem.weights.download();
    std::vector<std::int32_t> wide_ids(wide * static_cast<std::size_t>(most), 0);
    std::vector<float> wide_weights(wide_ids.size(), 1.0F);
    for (std::size_t i = 0; i < ids.size(); ++i) {
      std::size_t const at = i / static_cast<std::size_t>(s.topk) * wide + i % static_cast<std::size_t>(s.topk);
      wide_ids[at] = ids[i];
      wide_weights[at] = weights[i];
    }
    TypedMemory<std::int32_t> const strided_ids(wide_ids.size()), count(1);
    TypedMemory<float> const strided_weights(wide_weights.size());
    strided_ids.upload(wide_ids);
    strided_weights.upload(wide_weights);
    for (int tokens : c.tokens) {
      for (int max_splits : {1, 16}) {
        Tuning tuning{};
        tuning.tile_rows = tokens <= 8 ? 8 : 16;
        tuning.max_splits = max_splits;
        std::vector<char> wanted;
        enum { kBefore, kOnTheWay, kAgain, kStrided, kCounted };
        for (int way : {kBefore, kOnTheWay, kAgain, kStrided, kCounted}) {
          TypedMemory<char> const out(static_cast<std::size_t>(tokens) * s.hidden * 2);
          workspace.fill_bytes(0xFF);
          out.fill_bytes(0xFF);
          LayerCall call = problem.call(out.data());
          call.max_tokens = tokens;
          if (way == kStrided) {
            call.topk_ids = strided_ids.data();
            call.topk_weights = strided_weights.data();
            call.id_stride = call.weight_stride = static_cast<std::int64_t>(wide);
          }
          if (way == kCounted) {
            count.upload({tokens - 1});
            call.num_tokens = count.data();
          }
          tuning.self_align = way != kBefore;
          layer.forward(call, tuning, workspace.data(), nullptr);
          ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
          std::vector<char> got = out.download();
          if (way == kBefore) {
            wanted = got;
            if (tokens == most) EXPECT_LT(compare(problem, out.data(), 16).relative, tolerance(Scheme::fp8_block, 1));
          }
          if (way == kCounted) {  // fewer rows may be split along K differently: the reference is the same count with the kernel before
            out.fill_bytes(0xFF);
            tuning.self_align = false;
            layer.forward(call, tuning, workspace.data(), nullptr);
            ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
            wanted = out.download();
          }
          EXPECT_TRUE(got == wanted) << "way " << way << ", H " << s.hidden << " k " << s.topk << ", " << tokens << " tokens, splits up to "
                                     << max_splits << ", pattern " << static_cast<int>(c.pattern);
        }
      }
    }
  }
}

/// Whole tiles of 128 rows, tiles that fill more than half of one, and up to half, in one call. The rows behind the last expert's hold NaN.
TEST(HopperBlocks, RowsBeyondWholeTiles) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  constexpr int kCounts[] = {1, 7, 128, 8, 9, 33, 0, 63, 64, 65, 127, 129, 136, 192, 193, 256, 257, 300, 400, 16, 17, 32, 48, 49, 384, 5};
  constexpr int kExperts = static_cast<int>(std::size(kCounts));
  std::vector<std::int32_t> slots(101, -1);
  for (int e = 0; e < kExperts; ++e) slots.insert(slots.end(), static_cast<std::size_t>(kCounts[e]), e);
  std::shuffle(slots.begin(), slots.end(), std::mt19937_64(5));
  for (LocalShape shape :
       {LocalShape{kExperts, 384, 128, 1}, {kExperts, 384, 384, 2}, {kExperts, 1152, 128, 2}, {kExperts, 1152, 640, 1}}) {
    int const tokens = static_cast<int>(slots.size()) / shape.topk;
    Problem const problem(shape, Scheme::fp8_block, tokens, Pattern::random, 41);
    problem.ids.upload(slots);
    ContiguousLayer const layer(shape, Scheme::fp8_block, problem.layer_weights());
    TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(tokens)));
    TypedMemory<char> const out(static_cast<std::size_t>(tokens) * shape.hidden * 2);
    std::vector<char> first;
    for (int cluster : {1, 2}) {
      Tuning tuning{};
      tuning.tile_rows = kBlockRows;
      tuning.cluster = cluster;
      for (int repeat = 0; repeat < 3; ++repeat) {
        workspace.fill_bytes(0xFF);
        out.fill_bytes(0xFF);
        layer.forward(problem.call(out.data()), tuning, workspace.data(), nullptr);
        ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
        if (first.empty()) first = out.download();
        EXPECT_TRUE(first == out.download()) << "H " << shape.hidden << " I " << shape.intermediate << " k " << shape.topk
                                             << ", clusters of " << cluster << ", call " << repeat;
      }
      EXPECT_LT(compare(problem, out.data(), tokens).relative, tolerance(Scheme::fp8_block, tokens))
          << "H " << shape.hidden << " I " << shape.intermediate << " k " << shape.topk << ", clusters of " << cluster;
    }
  }
}

/// K of more steps than one chunk of weight scales holds, of GEMM1 and of GEMM2: whole chunks, one step more, and three chunks; and several
/// units per thread block, so that the chunks come round.
TEST(HopperBlocks, ScalesOfALongK) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  for (LocalShape shape : {LocalShape{2, 16384, 256, 1}, {2, 16512, 256, 1}, {2, 256, 16640, 1}, {1, 128, 33024, 1}}) {
    constexpr int kTokens = 450;
    Problem const problem(shape, Scheme::fp8_block, kTokens, Pattern::random, 43);
    ContiguousLayer const layer(shape, Scheme::fp8_block, problem.layer_weights());
    TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(kTokens)));
    TypedMemory<char> const out(static_cast<std::size_t>(kTokens) * shape.hidden * 2);
    std::vector<char> first;
    for (int cluster : {1, 2, 1, 2}) {
      Tuning tuning{};
      tuning.tile_rows = kBlockRows;
      tuning.cluster = cluster;
      workspace.fill_bytes(0xFF);
      out.fill_bytes(0xFF);
      layer.forward(problem.call(out.data()), tuning, workspace.data(), nullptr);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      if (first.empty()) {
        first = out.download();
        EXPECT_LT(compare(problem, out.data(), 64).relative, tolerance(Scheme::fp8_block, kTokens))
            << "H " << shape.hidden << " I " << shape.intermediate;
      }
      EXPECT_TRUE(first == out.download()) << "H " << shape.hidden << " I " << shape.intermediate << ", clusters of " << cluster;
    }
  }
}

TEST_P(Hopper, BadArgumentsAreRefusedBeforeALaunch) {
  Problem const problem(kTiny, GetParam(), 4, Pattern::random, 3);
  ContiguousLayer const layer(kTiny, GetParam(), problem.layer_weights());
  TypedMemory<char> const memory(1 << 22);
  LayerCall call = problem.call(memory.data());
  call.x = problem.x.data() + 2;
  EXPECT_THROW(layer.forward(call, memory.data(), nullptr), moe::Error);
  call = problem.call(memory.data());
  call.topk_ids = nullptr;
  EXPECT_THROW(layer.forward(call, memory.data(), nullptr), moe::Error);
  Tuning odd{};
  odd.tile_rows = 12;
  EXPECT_THROW(layer.forward(problem.call(memory.data()), odd, memory.data(), nullptr), moe::Error);
  EXPECT_THROW(layer.forward_batched(problem.x.data(), nullptr, 4, 4, memory.data(), memory.data(), nullptr), moe::Error);
  EXPECT_THROW(ContiguousLayer(LocalShape{8, 250, 256, 2}, GetParam(), problem.layer_weights()), moe::Error);
  if (is_row_scaled(GetParam())) {
    call = problem.call(memory.data());
    call.x_scales = nullptr;
    EXPECT_THROW(layer.forward(call, memory.data(), nullptr), moe::Error);
  }
}

INSTANTIATE_TEST_SUITE_P(Schemes, Hopper, testing::Values(Scheme::bf16, Scheme::f16, Scheme::fp8_block, Scheme::fp8_row, Scheme::int8_row),
                         [](auto const& info) { return std::string(name(info.param)); });

}  // namespace
