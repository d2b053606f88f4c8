// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_columns_test.cu: the Hopper layer in blocks of columns. The bits are those of a call without them, and a kernel that is
// told that a block is complete finds it so, while the layer still runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "hopper_composition.cuh"
#include "hopper_reference.cuh"
#include "moe/comm/arrivals.hpp"
#include "moe/comm/completions.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/core/ptx/clock.cuh"
#include "moe/core/ptx/memory.cuh"
#include "moe/experts/hopper/common/column_order.hpp"
#include "moe/experts/hopper/contiguous_layer.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/quantization/none.hpp"
#include "on_hopper.hpp"
#include "tests/expect_error.hpp"

namespace {

using namespace moe::hopper;
using namespace moe_test;
using moe::check_cuda;

/// Copies each block of columns of `out` [rows, hidden] to `seen` when its word tells that it is complete. late: a block was not told
/// within 20 s.
__global__ void watch_columns(std::uint32_t const* ready, std::uint32_t const* round, int stride, ColumnCut cut, int rows, int hidden,
                              std::uint16_t const* out, std::uint16_t* seen, int* late) {
  __shared__ bool told;
  for (int b = 0; b < cut.blocks; ++b) {
    if (threadIdx.x == 0) {
      std::uint64_t const start = moe::ptx::now_ns();
      told = true;
      while (moe::ptx::load_acquire_system(ready + b * stride) != *round) {
        if (moe::ptx::now_ns() - start > 20'000'000'000ULL) {
          told = false;
          *late = 1;
          break;
        }
      }
    }
    __syncthreads();
    if (told) {
      int const first = b * cut.columns;
      int const columns = min(cut.columns, hidden - first);
      long long const step = static_cast<long long>(gridDim.x) * blockDim.x;
      for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < static_cast<long long>(rows) * columns; i += step) {
        long long const at = i / columns * hidden + first + i % columns;
        seen[at] = __ldcg(out + at);
      }
    }
    __syncthreads();
  }
}

constexpr int kRanks = 3;
constexpr int kRank = 1;

/// The windows of three ranks on one device, of which rank 1 computes.
class Windows {
 public:
  Windows() : round_(1), failure_(1) {
    for (auto& part : parts_) {
      part = TypedMemory<char>(moe::comm::kWindowControlBytes + kMostColumnBlocks * kRanks * sizeof(std::uint32_t));
      part.fill_bytes(0);
    }
  }
  moe::comm::Completions completions(ColumnCut const& cut, int combine_blocks) const {
    moe::comm::Completions c{};
    for (int r = 0; r < kRanks; ++r) c.window.peer[r] = parts_[r].data();
    c.window.rank = kRank;
    c.window.size = kRanks;
    c.window.failure = failure_.data();
    c.ready = moe::comm::kWindowControlBytes;
    c.round = round_.data();
    c.blocks = cut.blocks;
    c.columns = cut.columns;
    c.combine_blocks = combine_blocks;
    return c;
  }
  /// Nothing is told yet; the round to come.
  void reset(std::uint32_t round) const {
    for (auto const& part : parts_) part.fill_bytes(0);
    round_.upload({round});
    check_cuda(cudaDeviceSynchronize(), "round");
  }
  std::uint32_t const* round() const { return round_.data(); }
  /// Rank 1's word of block 0, as rank `of` sees it; the next block's is kRanks words on.
  std::uint32_t const* word(int of) const {
    return reinterpret_cast<std::uint32_t const*>(parts_[of].data() + moe::comm::kWindowControlBytes) + kRank;
  }
  /// Every rank has been told every block in `round`, and no other word was touched.
  void expect_told(int blocks, std::uint32_t round, std::string const& what) const {
    for (int r = 0; r < kRanks; ++r) {
      std::vector<std::uint32_t> words(kMostColumnBlocks * kRanks);
      check_cuda(cudaMemcpy(words.data(), word(r) - kRank, words.size() * 4, cudaMemcpyDeviceToHost), "words");
      for (int i = 0; i < static_cast<int>(words.size()); ++i) {
        bool const mine = i % kRanks == kRank && i / kRanks < blocks;
        EXPECT_EQ(words[static_cast<std::size_t>(i)], mine ? round : 0U) << what << ", rank " << r << ", word " << i;
      }
    }
  }

 private:
  TypedMemory<char> parts_[kRanks];
  TypedMemory<std::uint32_t> round_;
  TypedMemory<moe::comm::FailureRecord> failure_;
};

class HopperColumns : public testing::TestWithParam<Scheme> {
 protected:
  static constexpr int kWatchers = 4;
  static constexpr int kLeft = 24;  // multiprocessors: also with clusters, all blocks of the layer are placed beside the watchers

  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    check_cuda(cudaStreamCreateWithFlags(&beside_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    if (beside_ != nullptr) cudaStreamDestroy(beside_);
  }

  /// Tunings with a kernel that has blocks of columns.
  static std::vector<Tuning> tunings() {
    std::vector<Tuning> all;
    for (int cluster : {1, 2}) {
      Tuning t{};
      t.tile_rows = GetParam() == Scheme::fp8_block ? kBlockRows : 160;
      t.cluster = cluster;
      all.push_back(t);
    }
    if (GetParam() != Scheme::fp8_block) {
      Tuning t{};
      t.tile_rows = 96;  // K may be split
      all.push_back(t);
    }
    return all;
  }

  /// One layer and one batch of which `valid` tokens count.
  struct Case {
    LocalShape shape;
    int tokens;
    Problem const problem;
    ContiguousLayer const layer;
    TypedMemory<char> const workspace, out;
    TypedMemory<std::int32_t> const count;
    LayerCall call;

    Case(LocalShape s, int tokens_, Pattern pattern, std::uint64_t seed, LayerOptions const& options = {}, int valid = -1)
        : shape(s),
          tokens(tokens_),
          problem(s, GetParam(), tokens_, pattern, seed),
          layer(s, GetParam(), problem.layer_weights(), options, launcher_with_columns(GetParam())),
          workspace(static_cast<std::size_t>(layer.workspace_bytes(tokens_))),
          out(static_cast<std::size_t>(tokens_) * static_cast<std::size_t>(s.hidden) * 2),
          count(1),
          call(problem.call(out.data())) {
      count.upload({valid < 0 ? tokens : valid});
      if (valid >= 0) call.num_tokens = count.data();
    }
    void poison() const {
      workspace.fill_bytes(0xFF);
      out.fill_bytes(0xFF);
      check_cuda(cudaDeviceSynchronize(), "poison");  // streams of tests do not wait for the default stream
    }
    std::vector<char> run(Tuning const& t, cudaStream_t stream) const {
      poison();
      layer.forward(call, t, workspace.data(), stream);
      EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      return out.download();
    }
  };

  /// The same bits in any number of blocks, and in blocks that are told to three ranks, twice each; the first is right.
  void check(LocalShape shape, int tokens, Pattern pattern, int valid = -1) {
    Case c(shape, tokens, pattern, seed_ += 13, {}, valid);
    Windows const windows;
    std::uint32_t round = 5;
    for (Tuning t : tunings()) {
      std::vector<char> const want = c.run(t, stream_);
      if (valid < 0) EXPECT_LT(compare(c.problem, c.out.data(), 64).relative, tolerance(GetParam(), tokens)) << tokens << " tokens, " << t;
      for (int blocks : {1, 2, 4, 8}) {
        ColumnCut const cut = cut_columns(shape.hidden, blocks);
        for (int repeat = 0; repeat < 2; ++repeat) {
          t.column_blocks = blocks;
          c.call.completions = nullptr;
          EXPECT_TRUE(want == c.run(t, stream_)) << tokens << " tokens, topk " << shape.topk << ", " << t;
          t.column_blocks = 0;
          auto const completions = windows.completions(cut, repeat == 0 ? 8 : 100000);
          windows.reset(++round);
          c.call.completions = &completions;
          EXPECT_TRUE(want == c.run(t, stream_)) << tokens << " tokens, topk " << shape.topk << ", told " << cut.blocks << ", " << t;
          windows.expect_told(cut.blocks, round, moe::text(tokens, " tokens, ", t));
        }
      }
      c.call.completions = nullptr;
    }
  }

  cudaStream_t stream_ = nullptr;
  cudaStream_t beside_ = nullptr;
  int multiprocessors_ = 0;
  std::uint64_t seed_ = 4000;
};

TEST_P(HopperColumns, TheBitsOfACallWithoutThem) {
  check({8, 1024, 256, 2}, 700, Pattern::random);
  check({5, 1152, 384, 3}, 333, Pattern::some_missing);
  check({32, 2048, 256, 8}, 1500, Pattern::random);
  check({4, 512, 256, 1}, 300, Pattern::random);
  check({4, 1152, 256, 1}, 300, Pattern::some_missing);
  check({16, 384, 128, 4}, 65, Pattern::few_experts);
}

TEST_P(HopperColumns, X5_OneExpertTakesAllOrNone) {
  for (int tokens : {1, 40, 700}) {
    check({8, 512, 256, 2}, tokens, Pattern::one_expert);
    check({8, 512, 256, 2}, tokens, Pattern::all_missing);
    check({8, 512, 256, 1}, tokens, Pattern::all_missing);
  }
}

TEST_P(HopperColumns, FewOfTheRowsThatFit) {
  for (int valid : {0, 1, 129}) {
    check({8, 768, 256, 2}, 500, Pattern::random, valid);
    check({8, 768, 256, 1}, 500, Pattern::some_missing, valid);
  }
}

// For compute-sanitizer, under which a larger case takes minutes.
TEST_P(HopperColumns, FewUnits) { check({2, 256, 128, 2}, 9, Pattern::random); }

// A hidden size that is no multiple of a unit of GEMM2, nor of a chunk that a warpgroup stores.
TEST_P(HopperColumns, RestsOfColumns) {
  if (GetParam() == Scheme::fp8_block) {
    check({8, 2688, 256, 4}, 400, Pattern::random);
  } else {
    for (int hidden : {64, 328, 776, 2880}) check({8, hidden, 200, 4}, 400, Pattern::random);
  }
}

TEST_P(HopperColumns, ModelShapes) {
  check({128, 2048, 768, 8}, 4096, Pattern::random);
  check({32, 7168, 2048, 1}, 2000, Pattern::some_missing);
}

// Each replay clears the counters of the one before, with as many and with fewer tokens.
TEST_P(HopperColumns, ReplaysOfAGraph) {
  constexpr int kTokens = 900;
  for (Tuning t : tunings()) {
    Case c({16, 1536, 256, 4}, kTokens, Pattern::random, 77, {}, kTokens);
    std::vector<std::vector<char>> want;
    std::vector<int> const counts{kTokens, 31, kTokens, 0, 600};
    for (int count : counts) {
      c.count.upload({count});
      want.push_back(c.run(t, stream_));
    }
    Windows const windows;
    ColumnCut const cut = cut_columns(c.shape.hidden, 4);
    auto const completions = windows.completions(cut, 8);
    for (bool told : {false, true}) {
      t.column_blocks = told ? 0 : 3;
      c.call.completions = told ? &completions : nullptr;
      moe::CudaGraph const graph(stream_, [&] { c.layer.forward(c.call, t, c.workspace.data(), stream_); });
      for (int turn = 0; turn < 3; ++turn) {
        for (std::size_t i = 0; i < counts.size(); ++i) {
          auto const round = static_cast<std::uint32_t>(100 * turn) + static_cast<std::uint32_t>(i) + 1;
          c.count.upload({counts[i]});
          windows.reset(round);
          if (i == 0) {
            c.poison();
          } else {
            c.out.fill_bytes(0xFF);  // the workspace is as the replay before left it
            check_cuda(cudaDeviceSynchronize(), "poison");
          }
          graph.launch(stream_);
          ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
          EXPECT_TRUE(want[i] == c.out.download()) << "turn " << turn << ", " << counts[i] << " tokens, told " << told << ", " << t;
          if (told) windows.expect_told(cut.blocks, round, moe::text("turn ", turn, ", ", counts[i], " tokens"));
        }
      }
    }
  }
}

// A kernel on another stream copies each block when it is told, while the layer runs on the other multiprocessors.
TEST_P(HopperColumns, ABlockIsCompleteWhenItIsTold) {
  for (LocalShape const shape : {LocalShape{32, 2048, 768, 8}, LocalShape{8, 2048, 768, 1}}) {
    for (Pattern pattern : {Pattern::random, Pattern::some_missing}) {
      for (Tuning const& t : tunings()) {
        constexpr int kTokens = 2000;
        LayerOptions options{};
        options.workers = multiprocessors_ - kLeft;
        Case c(shape, kTokens, pattern, 21, options);
        std::vector<char> const want = c.run(t, stream_);
        Windows const windows;
        ColumnCut const cut = cut_columns(shape.hidden, 4);
        auto const completions = windows.completions(cut, kWatchers);
        c.call.completions = &completions;
        TypedMemory<std::uint16_t> const seen(static_cast<std::size_t>(kTokens) * static_cast<std::size_t>(shape.hidden));
        TypedMemory<int> const late(1);
        for (std::uint32_t round = 1; round <= 4; ++round) {
          windows.reset(round);
          seen.fill_bytes(0x55);
          late.fill_bytes(0);
          c.poison();
          watch_columns<<<kWatchers, 256, 0, beside_>>>(windows.word(2), windows.round(), kRanks, cut, kTokens, shape.hidden,
                                                        reinterpret_cast<std::uint16_t const*>(c.out.data()), seen.data(), late.data());
          check_cuda(cudaGetLastError(), "watch_columns");
          c.layer.forward(c.call, t, c.workspace.data(), stream_);
          ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
          ASSERT_EQ(cudaStreamSynchronize(beside_), cudaSuccess);
          EXPECT_EQ(late.download()[0], 0) << t;
          std::vector<std::uint16_t> const copied = seen.download();
          EXPECT_EQ(std::memcmp(copied.data(), want.data(), want.size()), 0) << "round " << round << ", topk " << shape.topk << ", " << t;
          EXPECT_TRUE(want == c.out.download()) << t;
        }
      }
    }
  }
}

// Kernels without blocks of columns: small tiles, one token, a kernel that plans for itself. A kernel behind them tells all blocks.
TEST_P(HopperColumns, CallsWithoutBlocksTellThem) {
  constexpr LocalShape kShape{8, 512, 256, 2};
  for (int tokens : {1, 8, 40, 200}) {
    Case c(kShape, tokens, Pattern::some_missing, 5);
    std::vector<Tuning> all{choose_tuning(kShape, GetParam(), tokens)};
    for (int rows : {16, 64, 80}) {
      Tuning t{};
      t.tile_rows = rows;
      all.push_back(t);
    }
    Windows const windows;
    auto const completions = windows.completions({2, 256}, 8);
    std::uint32_t round = 40;
    for (Tuning const& t : all) {
      c.call.completions = nullptr;
      std::vector<char> const want = c.run(t, stream_);
      windows.reset(++round);
      c.call.completions = &completions;
      EXPECT_TRUE(want == c.run(t, stream_)) << t;
      windows.expect_told(2, round, moe::text(tokens, " tokens, ", t));
    }
  }
  Windows const windows;
  Case c(kShape, 8, Pattern::random, 6);
  auto const completions = windows.completions({2, 256}, 8);
  windows.reset(9);
  c.call.completions = &completions;
  c.call.max_tokens = 0;
  c.layer.forward(c.call, c.workspace.data(), stream_);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  windows.expect_told(2, 9, "no tokens");
}

TEST_P(HopperColumns, WrongBlocksAreRefused) {
  Case c({8, 512, 256, 2}, 40, Pattern::random, 7);
  auto const refused = [&](moe::comm::Completions const& completions) {
    c.call.completions = &completions;
    EXPECT_THROW(c.layer.forward(c.call, c.workspace.data(), stream_), moe::Error)
        << completions.blocks << " blocks of " << completions.columns;
  };
  Windows const windows;
  for (ColumnCut const cut : {ColumnCut{0, 512}, ColumnCut{9, 256}, ColumnCut{1, 256}, ColumnCut{3, 256}, ColumnCut{2, 384}}) {
    refused(windows.completions(cut, 0));
  }
  auto completions = windows.completions({2, 256}, 0);
  completions.round = nullptr;
  refused(completions);
  completions = windows.completions({2, 256}, 0);
  completions.window.size = 33;
  refused(completions);
  c.call.completions = nullptr;
  for (int blocks : {-1, 9}) {
    Tuning t{};
    t.column_blocks = blocks;
    EXPECT_THROW(c.layer.forward(c.call, t, c.workspace.data(), stream_), moe::Error) << blocks;
  }
}

TEST_P(HopperColumns, BlocksWithoutTheirKernelsAreRefused) {
  Case c({8, 512, 256, 2}, 700, Pattern::random, 8);
  ContiguousLayer const without(c.shape, GetParam(), c.problem.layer_weights());
  Tuning t = tunings()[0];
  t.column_blocks = 2;
  EXPECT_EQ(expect_error(moe::ErrorCode::argument, [&] { without.forward(c.call, t, c.workspace.data(), stream_); }),
            "column_blocks is 2, and this layer was built without kernels that have blocks of columns, so it must be 0. Build it with "
            "launcher_with_columns() in bf16 or fp8_block");
  t.column_blocks = 0;
  std::vector<char> const want = c.run(t, stream_);
  c.poison();
  without.forward(c.call, t, c.workspace.data(), stream_);
  ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  EXPECT_TRUE(want == c.out.download());
}

struct OverlapsCombine : CompositionConfig<moe::bf16, moe::activation::Silu> {
  static constexpr bool overlap_combine = true;
};

// Through the policy: alone, beside a dispatch whose rows are all there, and without rows.
TEST(HopperColumnsPolicy, TellsACombine) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  using Config = OverlapsCombine;  // else the policy takes no kernels with blocks of columns
  using Quant = moe::quantization::None;
  using Kernel = moe::experts::HopperContiguous::Kernel<Config, Quant, moe::ActivationFormat::standard>;
  using moe::make_rows;
  constexpr LocalShape kShape{8, 512, 256, 2};
  constexpr int kTokens = 700;
  ASSERT_EQ(choose_tuning(kShape, Scheme::bf16, kTokens, false).tile_rows, 160) << "the kernel with blocks of columns";
  Problem const problem(kShape, Scheme::bf16, kTokens, Pattern::random, 11);
  moe::experts::WeightStore<Config, Quant, moe::space::cuda> const store(kShape.num_experts, kShape.hidden, kShape.intermediate, true);
  auto const fill = [](auto const& codes, TypedMemory<char> const& from) {
    void* const to = const_cast<void*>(static_cast<void const*>(codes.data_handle()));
    check_cuda(cudaMemcpy(to, from.data(), from.bytes(), cudaMemcpyDeviceToDevice), "weights");
  };
  fill(store.view().w13.codes, problem.w13);
  fill(store.view().w2.codes, problem.w2);
  moe::Shape<Config> const shape({kShape.hidden, kShape.intermediate, kShape.num_experts, kShape.topk, false});
  moe::Arena<moe::space::cuda> arena;
  Kernel const kernel(shape, store.view(), kTokens, Quant{}, {}, {}, arena);
  TypedMemory<char> const out(std::size_t{kTokens} * kShape.hidden * 2);
  auto const tokens_of = [&](int rows) {
    return moe::StandardTokensOf<Config, Quant>{make_rows(reinterpret_cast<moe::bf16 const*>(problem.x.data()), rows, kShape.hidden),
                                                {},
                                                make_rows(static_cast<std::int32_t const*>(problem.ids.data()), rows, kShape.topk),
                                                make_rows(static_cast<float const*>(problem.weights.data()), rows, kShape.topk)};
  };
  auto const rows_out = [&](int rows) { return make_rows(reinterpret_cast<moe::bf16*>(out.data()), rows, kShape.hidden); };

  Windows const windows;
  auto const completions = windows.completions({2, 256}, 8);
  std::vector<std::uint64_t> expected(static_cast<std::size_t>(kShape.num_experts));
  std::vector<std::uint32_t> arrived(expected.size());
  for (std::int32_t id : problem.ids.download()) ++arrived[static_cast<std::size_t>(id)];
  for (std::size_t e = 0; e < expected.size(); ++e) expected[e] = moe::comm::count_word(1, 0, arrived[e]);
  TypedMemory<std::uint64_t> const device_expected(expected.size());
  TypedMemory<std::uint32_t> const device_arrived(expected.size());
  device_expected.upload(expected);
  device_arrived.upload(arrived);
  moe::comm::Arrivals arrivals{};
  arrivals.window = completions.window;
  arrivals.window.rank = 0;
  arrivals.window.size = 1;
  arrivals.arrived = device_arrived.data();
  arrivals.expected = device_expected.data();
  arrivals.stride = arrivals.experts = kShape.num_experts;

  moe::CudaStream const stream;
  std::uint32_t round = 0;
  auto const result = [&](auto&& call) {
    out.fill_bytes(0xFF);
    windows.reset(++round);
    call();
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return out.download();
  };
  std::vector<char> const want = result([&] { kernel.apply(tokens_of(kTokens), rows_out(kTokens), stream); });
  EXPECT_LT(compare(problem, out.data(), 64).relative, tolerance(Scheme::bf16, kTokens));
  EXPECT_TRUE(want == result([&] { kernel.apply(tokens_of(kTokens), rows_out(kTokens), completions, stream); }));
  windows.expect_told(2, round, "alone");
  EXPECT_TRUE(want == result([&] { kernel.apply(tokens_of(kTokens), rows_out(kTokens), arrivals, completions, stream); }));
  windows.expect_told(2, round, "beside a dispatch");
  EXPECT_TRUE(want == result([&] { kernel.apply(tokens_of(kTokens), rows_out(kTokens), stream); }));
  result([&] { kernel.apply(tokens_of(0), rows_out(0), completions, stream); });
  windows.expect_told(2, round, "without rows");
}

INSTANTIATE_TEST_SUITE_P(Schemes, HopperColumns, testing::Values(Scheme::bf16, Scheme::fp8_block),
                         [](auto const& info) { return std::string(name(info.param)); });

}  // namespace
