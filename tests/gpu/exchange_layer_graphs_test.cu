// SPDX-License-Identifier: Apache-2.0
// tests/gpu/exchange_layer_graphs_test.cu: a layer over every backend that can be captured, in one graph that is replayed with every number
// of valid rows (N14); its calls allocate nothing and wait for nothing; what cannot be captured is E_STATE before any work (N15).
#include <array>
#include <cstddef>
#include <type_traits>

#include "moe/runner/device/captured_sizes.hpp"
#include "moe/runner/device/row_kernels.cuh"
#include "moe/runner/runner.hpp"
#include "tests/expect_error.hpp"
#include "tests/gpu/forward_costs.cuh"
#include "tests/gpu/layer_ranks.cuh"

namespace {

using namespace moe_test;
using Self = comm::Self<Cuda>;

/// Every rank has another number of valid rows; the rows past them have no expert.
template <class Backend>
void replays(typename Backend::Params const& params = {}) {
  using Rank = LayerRank<Backend>;
  typename Rank::Layer::Params p{
      .placement = ExpertPlacement(kExperts, 1), .router = {.num_experts = kExperts, .topk = kTopK}, .backend = params};
  OneRank alone(kExperts, kTopK);
  {  // a kernel's first launch must not wait for a rank that waits for another
    Comms<typename Backend::Comm> one(1);
    Rank first(one.at(0), experts_of(p.placement, 0), p);
    first.bring(1, kMost);
    first.forward_routed(kMost);
    first.result(kMost);
    constexpr bool kQueriesEvents =
        std::is_same_v<typename Backend::Comm, Self> && !std::is_same_v<Backend, backends::NoExpertParallel<Cuda>>;
    expect_enqueues_only(first.stream(), Backend::kName, [&] { first.forward_routed(kMost); }, {.queries_events = kQueriesEvents});
  }
  Comms<typename Backend::Comm> comms(kRanks);
  p.placement = ExpertPlacement(kExperts, comms.size());
  std::vector<std::unique_ptr<Rank>> ranks;
  for (int r = 0; r < comms.size(); ++r) ranks.push_back(std::make_unique<Rank>(comms.at(r), experts_of(p.placement, r), p));
  for (auto& rank : ranks) rank->bring(2, kMost);
  for (auto& rank : ranks) rank->forward_routed(kMost);  // connects, outside the capture
  for (auto& rank : ranks) rank->result(kMost);
  for (auto& rank : ranks) rank->capture();
  for (std::int64_t n = 0; n <= kMost; ++n) {
    auto const valid = [&](std::size_t r) { return (n + 5 * static_cast<std::int64_t>(r)) % (kMost + 1); };
    auto const seed = [&](std::size_t r) { return static_cast<unsigned>(100 * n + static_cast<std::int64_t>(r)); };
    for (std::size_t r = 0; r < ranks.size(); ++r) ranks[r]->bring(seed(r), valid(r));
    for (auto& rank : ranks) rank->replay();
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      std::vector<float> const got = ranks[r]->result(kMost);
      alone.bring(seed(r), valid(r));
      alone.forward_routed(kMost);
      EXPECT_LT(relative_error(got, alone.result(kMost)), 1e-2) << Backend::kName << ", rank " << r << ", " << valid(r) << " valid rows";
      EXPECT_TRUE(std::all_of(got.begin() + valid(r) * kHidden, got.end(), [](float v) { return v == 0.0F; }))
          << Backend::kName << ", rank " << r << ": a row without experts is not zero";
    }
  }
}

TEST(CapturedLayer, N14_OneRank) {
  replays<backends::NoExpertParallel<Cuda>>();
  replays<backends::Naive<Self>>();
  replays<backends::AllGatherReduceScatter<Self>>();
  replays<backends::AllToAllV<Self>>();
}
TEST(CapturedLayer, N14_LowLatency) {
  replays<backends::LowLatency<Window>>();
  replays<backends::LowLatency<Window>>({.deduplicate = true});
  replays<backends::LowLatency<Window>>({.masks = true});
  replays<backends::LowLatencyRankMajor<Window>>();
}
TEST(CapturedLayer, N14_HighThroughput) { replays<backends::HighThroughput<Window>>(); }
TEST(CapturedLayer, N14_OneSided) { replays<backends::OneSided<Window>>(); }
TEST(CapturedLayer, N14_TwoSided) { replays<backends::TwoSided<Window>>(); }
TEST(CapturedLayer, N14_Pplx) { replays<backends::Pplx<Window>>(); }

// The number of rows itself in device memory, for the backend that takes it: the bits of a call with so many rows.
TEST(CapturedLayer, N14_RowCountOnTheDevice) {
  OneRank captured(kExperts, kTopK), direct(kExperts, kTopK);
  Self self;
  runner::CapturedSizes<Cuda> graphs;
  std::array<std::int64_t, 1> const sizes{kMost};
  captured.bring(1, kMost);
  graphs.capture(self, sizes, capture_obstacle(captured.layer()),
                 [&](std::int64_t rows, cudaStream_t stream) { captured.forward(rows, {.num_rows = graphs.num_rows()}, stream); });
  for (std::int64_t n = 0; n <= kMost; ++n) {
    captured.bring(static_cast<unsigned>(20 + n), kMost);
    direct.bring(static_cast<unsigned>(20 + n), kMost);
    graphs.replay(n, captured.stream());
    direct.forward(n);
    EXPECT_EQ(captured.result(n), direct.result(n)) << n << " rows";
  }
}

/// A call of a layer or runner that reads counts on the host, in a stream that is being captured.
template <class Call>
void expect_refused_capture(CudaStream& stream, char const* backend, Call const& call) {
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  expect_error(ErrorCode::state, text("capture: ", backend, " reads exact sizes on the host"), call);
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  std::size_t nodes = 1;
  check_cuda(cudaGraphGetNodes(graph, nullptr, &nodes), "cudaGraphGetNodes");
  EXPECT_EQ(nodes, 0U) << "work was issued";
  cudaGraphDestroy(graph);
}

template <class Backend>
void refuses() {
  using Rank = LayerRank<Backend>;
  using R = Runner<typename Rank::Layer>;
  Self self;
  typename Rank::Layer::Params p{.placement = ExpertPlacement(kExperts, 1),
                                 .router = {.num_experts = kExperts, .topk = kTopK},
                                 .backend = {.sizes = backends::Sizes::exact}};
  Rank rank(self, experts_of(p.placement, 0), p);
  rank.bring(3, kMost);
  expect_refused_capture(rank.stream(), Backend::kName, [&] { rank.forward(kMost); });
  expect_refused_capture(rank.stream(), Backend::kName, [&] { rank.forward_routed(kMost); });

  RankStore const store = store_of(experts_of(p.placement, 0));
  p.shape = {kHidden, kIntermediate, kExperts, kTopK, false};
  p.max_tokens_per_rank = kMost;
  R block(self, store.view(), {.layer = p});
  Buffer<float, Cuda> logits(kMost * kExperts);
  expect_refused_capture(rank.stream(), Backend::kName, [&] {
    block.forward(rank.x(kMost), make_rows(static_cast<float const*>(logits.data()), kMost, kExperts), rank.y(kMost), {}, rank.stream());
  });

  runner::CapturedSizes<Cuda> graphs;
  std::array<std::int64_t, 1> const sizes{kMost};
  expect_error(ErrorCode::state, text("capture: ", Backend::kName, " reads exact sizes"), [&] {
    graphs.capture(self, sizes, capture_obstacle(rank.layer()), [](std::int64_t, cudaStream_t) { FAIL() << "work was issued"; });
  });

  rank.forward_routed(kMost);  // the next call works
  OneRank alone(kExperts, kTopK);
  alone.bring(3, kMost);
  alone.forward_routed(kMost);
  EXPECT_LT(relative_error(rank.result(kMost), alone.result(kMost)), 1e-2);
}

TEST(CapturedLayer, N15_ExactSizesAreRefusedBeforeAnyWork) {
  refuses<backends::Naive<Self>>();
  refuses<backends::AllGatherReduceScatter<Self>>();
  refuses<backends::AllToAllV<Self>>();
}

}  // namespace
