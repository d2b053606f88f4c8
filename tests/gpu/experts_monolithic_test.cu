// SPDX-License-Identifier: Apache-2.0
// tests/gpu/experts_monolithic_test.cu: experts that route inside, on the device (N16): the bits of experts with routed rows over the same
// backend, with padding, in a graph, by a row count in device memory. Between ranks: tests/multigpu/runner_grid_test.cpp.
#include <array>

#include "moe/experts/monolithic.cuh"
#include "moe/runner/device/captured_sizes.hpp"
#include "tests/expect_error.hpp"
#include "tests/gpu/layer_ranks.cuh"

namespace {

using namespace moe_test;
using Self = comm::Self<Cuda>;
using Routed = experts::CudaReference;
using Inside = experts::Monolithic<Routed>;
using backends::Sizes;

std::vector<int> all_experts() { return experts_of(ExpertPlacement(kExperts, 1), 0); }
routing::RouterConfig grouped() {
  routing::RouterConfig c{.num_experts = kExperts, .topk = kTopK};
  c.scoring = routing::Scoring::sigmoid;
  c.num_expert_group = 4;
  c.topk_group = 2;
  c.renorm = routing::Renorm::sum;
  c.routed_scaling_factor = 2.5F;
  return c;
}

template <class Backend>
void equals_routed_rows(typename Backend::Params const& params = {}) {
  using One = LayerRank<Backend, Inside>;
  using Other = LayerRank<Backend, Routed>;
  static_assert(One::Layer::kMonolithic && !Other::Layer::kMonolithic);
  Self self;
  for (routing::RouterConfig const& router : {routing::RouterConfig{.num_experts = kExperts, .topk = kTopK}, grouped()}) {
    One inside(self, all_experts(), {.placement = ExpertPlacement(kExperts, 1), .router = router, .backend = params});
    Other outside(self, all_experts(), {.placement = ExpertPlacement(kExperts, 1), .router = router, .backend = params});
    for (std::int64_t const rows : {12, 5, 1, 0}) {
      for (std::int64_t const valid : {rows, rows / 2}) {
        SCOPED_TRACE(text(Backend::kName, ", ", rows, " rows, ", valid, " valid"));
        unsigned const seed = static_cast<unsigned>(10 * rows + valid);
        inside.bring(seed, kMost);
        outside.bring(seed, kMost);
        inside.forward(rows, {.num_valid_rows = valid});
        outside.forward(rows, {.num_valid_rows = valid});
        EXPECT_EQ(inside.result(rows), outside.result(rows));
      }
    }
    if (!is_capturable(inside.layer())) continue;
    runner::CapturedSizes<Cuda> graphs;
    std::array<std::int64_t, 1> const sizes{kMost};
    inside.bring(1, kMost);
    graphs.capture(self, sizes, capture_obstacle(inside.layer()),
                   [&](std::int64_t n, cudaStream_t stream) { inside.forward(n, {}, stream); });
    for (unsigned const seed : {51U, 52U, 53U}) {
      inside.bring(seed, kMost);
      outside.bring(seed, kMost);
      graphs.replay(kMost, inside.stream());
      outside.forward(kMost);
      EXPECT_EQ(inside.result(kMost), outside.result(kMost)) << Backend::kName << ", replayed";
    }
  }
}

TEST(Monolithic, N16_Local) { equals_routed_rows<backends::NoExpertParallel<Cuda>>(); }
TEST(Monolithic, N16_Gathered) {
  for (Sizes const sizes : {Sizes::exact, Sizes::fixed}) {
    equals_routed_rows<backends::Naive<Self>>({.sizes = sizes});
    equals_routed_rows<backends::AllGatherReduceScatter<Self>>({.sizes = sizes});
  }
}

TEST(Monolithic, RowCountOnTheDevice) {
  Self self;
  using Local = backends::NoExpertParallel<Cuda>;
  LayerRank<Local, Inside> inside(self, all_experts(),
                                  {.placement = ExpertPlacement(kExperts, 1), .router = {.num_experts = kExperts, .topk = kTopK}});
  LayerRank<Local, Routed> outside(self, all_experts(),
                                   {.placement = ExpertPlacement(kExperts, 1), .router = {.num_experts = kExperts, .topk = kTopK}});
  Buffer<std::int32_t, Cuda> count(1);
  for (std::int32_t const n : {0, 1, 7, 12}) {
    inside.bring(static_cast<unsigned>(n), kMost);
    outside.bring(static_cast<unsigned>(n), kMost);
    count.copy_from_host(&n);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    inside.forward(kMost, {.num_rows = count.data()});
    outside.forward(n);
    EXPECT_EQ(inside.result(n), outside.result(n)) << n << " rows";
  }
}

TEST(Monolithic, WhatNeedsRoutingOutsideIsRefused) {
  Self self;
  using One = LayerRank<backends::NoExpertParallel<Cuda>, Inside>;
  typename One::Layer::Params p{.placement = ExpertPlacement(kExperts, 1), .router = {.num_experts = kExperts, .topk = kTopK}};
  Buffer<std::int32_t, Cuda> counts(kExperts);
  p.load.load_counter = counts.data();
  expect_error(ErrorCode::config, "monolithic kernel without EPLB", [&] { One rank(self, all_experts(), p); });
}

}  // namespace
