// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_grid_test.cpp: a block on every grid of GPUs gives what one rank gives, by every backend of the registry that needs
// no window (runner_grid_windows_test.cpp has the others); chunks give the bits of the whole batch; wrong calls reach all ranks.
// moe-ranks: 2 4
#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "moe/experts/monolithic.hpp"
#include "moe/runner/device/captured_sizes.hpp"
#include "registry_backends.hpp"
#include "runner_grid_cases.hpp"

namespace moe_test::grid {
INSTANTIATE_TYPED_TEST_SUITE_P(OverNccl, RunnerGrid, TestTypes<backends_over_nccl>, BackendNames);
INSTANTIATE_TYPED_TEST_SUITE_P(OverNccl, FusedShared, TestTypes<backends_over_nccl>, BackendNames);
}  // namespace moe_test::grid

namespace {

using namespace moe_test::grid;
using moe_test::expect_error;
using Local = backends::NoExpertParallel<Cuda>;
using Gather = backends::AllGatherReduceScatter<Nccl>;
using Naive = backends::Naive<Nccl>;
using LowLatency = backends::LowLatency<comm::NcclSymmetric>;
using Inside = experts::Monolithic<experts::CudaReference>;

/// A grid in one graph: ranks that state their rows do not wait for other ranks.
template <class Backend>
void replays(Grid const& g, SharedOutput shared) {
  Model const m{.form = {false, false, shared}};
  Rank<Backend> rank(g, m, true);
  std::vector<float> const want = rank.forward(bf16_numbers(70, 4 * kHidden));
  Rowset rows(bf16_numbers(70, 4 * kHidden));
  {
    runner::CapturedSizes<Cuda> graphs;
    std::vector<std::int64_t> const sizes{4};
    graphs.capture(*group({"ep", 0}), sizes, runner::capture_obstacle(rank.runner), [&](std::int64_t n, cudaStream_t s) {
      rank.runner.forward(make_rows(rows.x().data_handle(), n, kHidden), make_rows(rows.y().data_handle(), n, kHidden), {}, s);
    });
    for (int i = 0; i < 3; ++i) {
      Memory<Cuda>::fill(rows.out.data(), 0xff, rows.out.bytes());
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      graphs.replay(4, rank.stream);
      finish(rank.runner, rank.tp, rank.stream);
      EXPECT_EQ(rows.result(), want);
    }
  }
  Rank<Backend> asks(g, m, false);
  {
    runner::CapturedSizes<Cuda> graphs;
    std::vector<std::int64_t> const sizes{4};
    expect_error(ErrorCode::state, "capture: the TP group: rows_agree is false", [&] {
      graphs.capture(*group({"ep", 0}), sizes, runner::capture_obstacle(asks.runner),
                     [](std::int64_t, cudaStream_t) { FAIL() << "work was issued"; });
    });
  }
  CudaStream stream;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  expect_error(ErrorCode::state, "capture: the TP group: rows_agree is false",
               [&] { asks.runner.forward(rows.x(), rows.y(), {}, stream); });
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  cudaGraphDestroy(graph);
  std::vector<float> const again = asks.forward(bf16_numbers(70, 4 * kHidden));
  EXPECT_EQ(again, want) << "the refused capture left nothing behind";
}
TEST(RunnerGridGraph, TensorParallelLocal) { replays<Local>({world_size(), 1, 1, true}, SharedOutput::partial); }
TEST(RunnerGridGraph, TensorParallelLowLatency) { replays<LowLatency>({world_size(), 1, 1, true}, SharedOutput::complete); }

/// A grid captured at several sizes: each number of rows runs the graph of the smallest size that holds them, with the bits of a call of
/// that size.
template <class Backend>
void replays_several_sizes(Grid const& g, SharedOutput shared) {
  SCOPED_TRACE(text(Backend::kName, ", tp ", g.tp, ", dp ", g.dp));
  Model const m{.form = {false, false, shared}};
  Rank<Backend> rank(g, m, true);
  std::vector<std::int64_t> const sizes{7, 2, 4, 2};
  Rowset rows(bf16_numbers(70 + rank.moe.dp_rank, kMost * kHidden));
  auto const forward = [&](std::int64_t n, cudaStream_t s) {
    rank.runner.forward(make_rows(rows.x().data_handle(), n, kHidden), make_rows(rows.y().data_handle(), n, kHidden), {}, s);
  };
  auto const result = [&](std::int64_t n) {
    finish(rank.runner, rank.tp, rank.stream);
    std::vector<float> out = rows.result();
    out.resize(static_cast<std::size_t>(n * kHidden));
    return out;
  };
  auto const clear = [&] {
    Memory<Cuda>::fill(rows.out.data(), 0xff, rows.out.bytes());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  };
  std::map<std::int64_t, std::vector<float>> want;
  for (std::int64_t const n : sizes) {
    clear();
    forward(n, rank.stream);
    want[n] = result(n);
  }
  runner::CapturedSizes<Cuda> graphs;
  graphs.capture(*group({"ep", 0}), sizes, runner::capture_obstacle(rank.runner), forward);
  EXPECT_EQ(graphs.sizes(), (std::vector<std::int64_t>{2, 4, 7}));
  for (std::int64_t const n : {1, 7, 3, 2, 4, 5, 1, 6}) {
    SCOPED_TRACE(text(n, " rows"));
    clear();
    std::int64_t const size = graphs.replay(n, rank.stream);
    EXPECT_EQ(size, n <= 2 ? 2 : n <= 4 ? 4 : 7);
    EXPECT_EQ(result(size), want[size]);
    std::vector<float> const all = rows.result();
    EXPECT_TRUE(std::all_of(all.begin() + size * kHidden, all.end(), [](float v) { return std::isnan(v); })) << "rows of another size";
  }
  expect_error(ErrorCode::capacity, "8 rows exceed the largest size 7", [&] { graphs.replay(kMost + 1, rank.stream); });
}
TEST(RunnerGridGraph, SeveralSizesLocal) { replays_several_sizes<Local>({world_size(), 1, 1, true}, SharedOutput::partial); }
TEST(RunnerGridGraph, SeveralSizesLowLatency) {
  replays_several_sizes<LowLatency>({world_size(), 1, 1, true}, SharedOutput::complete);
  replays_several_sizes<LowLatency>({1, world_size(), 1, true}, SharedOutput::complete);
}

/// Ranks with other sizes, and a rank whose sizes are impossible: an error on all ranks before any forward, and the next capture works.
template <class Backend>
void refuses_other_sizes(Grid const& g, SharedOutput shared) {
  Model const m{.form = {false, false, shared}};
  Rank<Backend> rank(g, m, true);
  std::vector<float> const x = bf16_numbers(80 + rank.moe.dp_rank, 4 * kHidden), want = rank.forward(x);
  bool const last = world_rank() == world_size() - 1;
  Rowset rows(x);
  int calls = 0;
  runner::CapturedSizes<Cuda> graphs;
  auto const capture = [&](std::vector<std::int64_t> const& sizes, std::string const& obstacle = "") {
    graphs.capture(*group({"ep", 0}), sizes, obstacle, [&](std::int64_t n, cudaStream_t s) {
      ++calls;
      rank.runner.forward(make_rows(rows.x().data_handle(), n, kHidden), make_rows(rows.y().data_handle(), n, kHidden), {}, s);
    });
  };
  auto const sizes_of = [&](std::vector<std::int64_t> const& most, std::vector<std::int64_t> const& of_last) {
    return last ? of_last : most;
  };
  expect_error(ErrorCode::mismatch, "ranks disagree about the captured sizes", [&] { capture(sizes_of({2, 4}, {2, 3})); });
  expect_error(ErrorCode::mismatch, "ranks disagree about the captured sizes", [&] { capture(sizes_of({2, 4}, {4})); });
  expect_error(last ? ErrorCode::config : ErrorCode::peer, last ? "no sizes are given" : "refused its arguments with E_CONFIG",
               [&] { capture(sizes_of({2, 4}, {})); });
  expect_error(last ? ErrorCode::state : ErrorCode::peer, last ? "capture: an obstacle" : "refused its arguments with E_STATE",
               [&] { capture({2, 4}, last ? "an obstacle" : ""); });
  EXPECT_EQ(calls, 0) << "work was issued";
  expect_error(ErrorCode::state, "nothing is captured", [&] { graphs.replay(2, rank.stream); });
  capture(sizes_of({2, 4}, {4, 2, 4}));  // the same sizes
  EXPECT_EQ(calls, 4);
  Memory<Cuda>::fill(rows.out.data(), 0xff, rows.out.bytes());
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  EXPECT_EQ(graphs.replay(4, rank.stream), 4);
  finish(rank.runner, rank.tp, rank.stream);
  EXPECT_EQ(rows.result(), want);
}
TEST(RunnerGridGraph, OtherSizesAreRefusedLocal) { refuses_other_sizes<Local>({world_size(), 1, 1, true}, SharedOutput::partial); }
TEST(RunnerGridGraph, OtherSizesAreRefusedLowLatency) {
  refuses_other_sizes<LowLatency>({1, world_size(), 1, true}, SharedOutput::complete);
}

// ---- Experts that route inside (N16): rows and logits are gathered, and every rank chooses.

template <class Backend, class Experts>
std::vector<float> gathered(MoeParallel const& moe) {
  using L = ModularKernel<Config, routing::AnyRouter, quantization::None, Backend, Experts>;
  using R = Runner<L, GateParts>;
  Model const m{.form = {false, false, SharedOutput::none}};
  ExpertPlacement const placement(kExperts, moe.ep_size);
  Store const store = experts_of<Store>(m, placement, moe.ep_rank, moe.moe_tp_rank, moe.moe_tp_size);
  typename R::Params p{
      .layer = {.shape = {.hidden = kHidden, .intermediate = kIntermediate / moe.moe_tp_size, .num_experts = kExperts, .topk = kTopK},
                .max_tokens_per_rank = kMost,
                .placement = placement,
                .router = {.num_experts = kExperts, .topk = kTopK}}};
  OnDevice weights;
  p.gate.weight = make_rows(weights.as(p.gate.weight.data_handle(), bf16_numbers(1, kExperts * kHidden)), kExperts, kHidden);
  Nccl* const tp = tp_comm(moe);
  p.parallel = {.moe = moe, .tp = tp};
  return with_comm<Backend>(moe, [&](auto& comm) {
    R runner(comm, store.view(), p);
    CudaStream stream;
    Rowset rows(tokens(moe));
    runner.forward(rows.x(), rows.y(), {}, stream);
    finish(runner, tp, stream);
    return rows.result();
  });
}

template <class Backend>
class MonolithicGrid : public testing::Test {};
using MonolithicBackends = testing::Types<Local, Gather, Naive>;
TYPED_TEST_SUITE(MonolithicGrid, MonolithicBackends);

TYPED_TEST(MonolithicGrid, N16_EqualsRoutedRows) {
  int ran = 0;
  for (Grid const& g : grids(world_size())) {
    MoeParallel const moe = parallel_of(g, world_rank(), TypeParam::kFacts);
    if (runner::parallel_conflict(moe) != nullptr) continue;
    SCOPED_TRACE(text("tp ", g.tp, ", dp ", g.dp, ", pcp ", g.pcp, ", ep ", g.ep));
    std::vector<float> const want = gathered<TypeParam, experts::CudaReference>(moe);
    expect_close(gathered<TypeParam, Inside>(moe), want, kTolerance);
    ++ran;
  }
  EXPECT_GT(ran, 0);
}

// The block of N1, as with routed rows.
TYPED_TEST(MonolithicGrid, N1_EqualsOneRank) { equals_one_rank<TypeParam, Inside>(); }

// A rank with a wrong argument, and a TP group whose ranks differ: all ranks get an error, and the next call works.
TEST(RunnerGridErrors, ReachAllRanks) {
  int const last = world_size() - 1;
  Model const m{.form = {false, false, SharedOutput::partial}};
  Rank<Local> rank({world_size(), 1, 1, true}, m, false);
  bool const errs = world_rank() == last;
  auto forward = [&](std::int64_t n, std::int64_t out_rows) {
    Rowset rows(bf16_numbers(50, 3 * kHidden));
    rank.runner.forward(make_rows(rows.x().data_handle(), n, kHidden), make_rows(rows.y().data_handle(), out_rows, kHidden), {},
                        rank.stream);
    finish(rank.runner, rank.tp, rank.stream);
  };
  if (errs) {
    expect_error(ErrorCode::argument, "output: rows: 2, expected 3", [&] { forward(3, 2); });
  } else {
    expect_error(ErrorCode::peer, text("TP rank ", last, " failed with E_ARG"), [&] { forward(3, 3); });
  }
  forward(3, 3);
  expect_error(ErrorCode::mismatch, "TP ranks hold the same tokens", [&] { forward(errs ? 2 : 3, errs ? 2 : 3); });
  forward(3, 3);
}

// The last rank's call is wrong, row by row. TP ranks learn it from their group, DP ranks from the layer's; the next call works.
template <class Backend>
void wrong_calls(Grid const& g) {
  struct Row {
    std::int64_t rows, hidden, out_rows, out_hidden;
    ErrorCode code;
    std::string text;
  };
  std::vector<Row> const wrong{
      {3, kHidden - 8, 3, kHidden, ErrorCode::argument, "hidden_states: width: 56, expected 64"},
      {3, kHidden, 3, kHidden - 8, ErrorCode::argument, "output: width: 56, expected 64"},
      {3, kHidden, 2, kHidden, ErrorCode::argument, "output: rows: 2, expected 3"},
      {kMost + 1, kHidden, kMost + 1, kHidden, ErrorCode::capacity, "hidden_states: 8 rows exceed max_tokens_per_rank 7"},
  };
  BackendFacts facts = Backend::kFacts;
  facts.sequence_parallel = false;
  Model const m{.form = {false, false, SharedOutput::partial}};
  Rank<Backend> rank(g, m, false, facts);
  Rowset rows(bf16_numbers(50, (kMost + 1) * kHidden));
  auto const forward = [&](Row const& r) {
    rank.runner.forward(make_rows(rows.x().data_handle(), r.rows, r.hidden), make_rows(rows.y().data_handle(), r.out_rows, r.out_hidden),
                        {}, rank.stream);
    finish(rank.runner, rank.tp, rank.stream);
  };
  Row const right{3, kHidden, 3, kHidden, ErrorCode::argument, ""};
  for (Row const& row : wrong) {
    SCOPED_TRACE(row.text);
    if (world_rank() == world_size() - 1) {
      expect_error(row.code, row.text, [&] { forward(row); });
    } else {
      expect_error(ErrorCode::peer, g.tp > 1 ? text("TP rank ", g.tp - 1, " failed with ", name(row.code)) : "", [&] { forward(right); });
    }
    MPI_Barrier(MPI_COMM_WORLD);
    forward(right);
  }
}
TEST(RunnerGridErrors, WrongCallsRowByRow) {
  wrong_calls<Local>({world_size(), 1, 1, true});
  wrong_calls<Gather>({1, world_size(), 1, true});
}

// A reduction that is asked of a group that is down; a new group works.
TEST(RunnerGridErrors, GroupThatIsDown) {
  Model const m{.form = {false, false, SharedOutput::partial}};
  std::vector<float> const x = bf16_numbers(50, 3 * kHidden);
  {
    Rank<Local> rank({world_size(), 1, 1, true}, m, false);
    expect_close(rank.forward(x), on_one_rank(m, x), kTolerance);
    MPI_Barrier(MPI_COMM_WORLD);  // between hosts a rank's sends may still be under way when its own sum has ended
    rank.tp->abort();
    expect_error(ErrorCode::peer, "the TP group is down", [&] { rank.forward(x); });
  }
  communicators.clear();
  MPI_Barrier(MPI_COMM_WORLD);
  Rank<Local> again({world_size(), 1, 1, true}, m, false);
  expect_close(again.forward(x), on_one_rank(m, x), kTolerance);
}

struct WholeParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
};
struct ChunkParts : WholeParts {
  using Chunking = runner::chunking::Lockstep;
};

template <class Backend>
class RunnerChunks : public testing::Test {
 protected:
  template <class P>
  using R = Runner<LayerOf<Backend>, P>;
  Model const m{.form = {false, false, SharedOutput::none}};
  Nccl& comm = *group({"ep", 0});
  ExpertPlacement const placement{kExperts, world_size()};
  Store store = experts_of<Store>(m, placement, world_rank(), 0, 1);
  OnDevice weights;
  CudaStream stream;
  // The identity as a mapping, so that slots are counted.
  Buffer<std::int32_t, Cuda> slots{kExperts}, ones{kExperts}, counted{kExperts};
  void SetUp() override {
    std::vector<std::int32_t> ids(kExperts);
    std::iota(ids.begin(), ids.end(), 0);
    slots.copy_from_host(ids.data());
    ones.copy_from_host(std::vector<std::int32_t>(kExperts, 1).data());
  }
  std::vector<std::int32_t> counts() {
    std::vector<std::int32_t> out(kExperts);
    counted.copy_to_host(out.data());
    return out;
  }

  template <class P>
  typename R<P>::Params chunk_params(std::int64_t capacity) {
    typename R<P>::Params p{.layer = {.shape = {.hidden = kHidden, .intermediate = kIntermediate, .num_experts = kExperts, .topk = kTopK},
                                      .max_tokens_per_rank = capacity,
                                      .placement = placement,
                                      .router = {.num_experts = kExperts, .topk = kTopK}}};
    p.gate.weight = make_rows(weights.as(p.gate.weight.data_handle(), bf16_numbers(1, kExperts * kHidden)), kExperts, kHidden);
    p.layer.mapping = {.num_experts = kExperts,
                       .num_physical = kExperts,
                       .max_replicas = 1,
                       .logical_to_physical = slots.data(),
                       .replica_count = ones.data(),
                       .source_rank = world_rank(),
                       .ep_size = world_size()};
    p.layer.load.load_counter = counted.data();
    return p;
  }
  template <class Runner>
  std::vector<float> run(Runner& runner, std::vector<float> const& x) {
    Rowset rows(x);
    Memory<Cuda>::fill(counted.data(), 0, counted.bytes());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    runner.forward(rows.x(), rows.y(), {}, stream);
    finish(runner, &comm, stream);
    return rows.result();
  }
  static std::int64_t num_rows_of(std::vector<int> const& counts) { return counts[static_cast<std::size_t>(world_rank())]; }
};
using ChunkBackends = testing::Types<Gather, LowLatency>;
TYPED_TEST_SUITE(RunnerChunks, ChunkBackends);

TYPED_TEST(RunnerChunks, N2_N3_N4_N22_EqualTheWholeBatch) {
  using Whole = typename TestFixture::template R<WholeParts>;
  using Chunked = typename TestFixture::template R<ChunkParts>;
  std::vector<std::vector<int>> const steps{{5, 3, 0, 1}, {3, 0, 5, 1}, {0, 0, 0, 0}, {4, 4, 0, 4}, {1, 1, 1, 1}, {5, 5, 5, 5}};
  Whole whole(this->comm, this->store.view(), this->template chunk_params<WholeParts>(kMost));
  for (int chunk : {1, 2, 8}) {
    for (ChunkMode mode : {ChunkMode::exact, ChunkMode::min_one}) {
      for (std::int64_t most : {0, 5}) {
        auto p = this->template chunk_params<ChunkParts>(chunk);
        p.chunking.mode = mode;
        p.chunking.most_rows = most;
        Chunked chunked(this->comm, this->store.view(), p);
        for (auto const& counts : steps) {
          SCOPED_TRACE(text("chunk ", chunk, ", mode ", static_cast<int>(mode), ", most ", most, ", rank 0 has ", counts[0]));
          std::vector<float> const x = bf16_numbers(1000 + world_rank(), this->num_rows_of(counts) * kHidden);
          std::vector<float> const want = this->run(whole, x);
          std::vector<std::int32_t> const slots = this->counts();
          EXPECT_EQ(this->run(chunked, x), want);
          EXPECT_EQ(this->counts(), slots) << "slots of real rows only";
          EXPECT_EQ(std::accumulate(slots.begin(), slots.end(), 0), this->num_rows_of(counts) * kTopK);
        }
      }
    }
  }
}

/// A batch of fixed passes in one graph; a rank whose rows exceed the stated ones is refused before any pass, and the next call works.
TYPED_TEST(RunnerChunks, StatedRowsNeedNoHost) {
  using Chunked = typename TestFixture::template R<ChunkParts>;
  auto p = this->template chunk_params<ChunkParts>(2);
  p.chunking.most_rows = 5;
  Chunked chunked(this->comm, this->store.view(), p);
  std::vector<float> const x = bf16_numbers(1000 + world_rank(), (5 - world_rank() % 3) * kHidden), want = this->run(chunked, x);
  Rowset rows(x);
  {
    runner::CapturedSizes<Cuda> graphs;
    std::vector<std::int64_t> const sizes{5};
    graphs.capture(this->comm, sizes, runner::capture_obstacle(chunked),
                   [&](std::int64_t, cudaStream_t s) { chunked.forward(rows.x(), rows.y(), {}, s); });
    for (int i = 0; i < 2; ++i) {
      Memory<Cuda>::fill(rows.out.data(), 0xff, rows.out.bytes());
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      graphs.replay(5, this->stream);
      finish(chunked, &this->comm, this->stream);
      EXPECT_EQ(rows.result(), want);
    }
  }
  std::vector<float> const long_x = bf16_numbers(5, 6 * kHidden);
  if (world_rank() == 0) {
    expect_error(ErrorCode::capacity, "hidden_states: 6 rows exceed 5", [&] { this->run(chunked, long_x); });
  } else {
    expect_error(ErrorCode::peer, "", [&] { this->run(chunked, x); });
  }
  MPI_Barrier(MPI_COMM_WORLD);
  try {  // over a window the other ranks find the abandoned passes one by one
    finish(chunked, &this->comm, this->stream);
  } catch (Error const& e) {
    EXPECT_EQ(e.code(), ErrorCode::peer) << e.what();
  }
  MPI_Barrier(MPI_COMM_WORLD);
  EXPECT_EQ(this->run(chunked, x), want);
}

}  // namespace
