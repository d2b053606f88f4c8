// SPDX-License-Identifier: Apache-2.0
// tests/gpu/simulated_high_throughput.cuh: HighThroughput's kernels between ranks that share one GPU: their windows, tokens and checks.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tests/gpu/shared_gpu.cuh"
#include "tests/multigpu/exchange_harness.cuh"

namespace moe_test {

/// The shape of a test's case.
template <class Case>
moe::detail::HighThroughputShape high_throughput_shape(Case const& c) {
  moe::detail::HighThroughputShape shape;
  shape.ranks = c.ranks;
  shape.max_tokens = c.max_tokens;
  shape.hidden = c.hidden;
  shape.topk = c.topk;
  shape.num_experts = c.experts;
  shape.fp8 = c.fp8;
  return shape;
}

/// What every run has; a test adds how a rank's kernels follow each other.
class SimulatedHighThroughput {
 public:
  using Calls = moe::detail::HighThroughputCalls;
  using Shape = moe::detail::HighThroughputShape;
  void bring(unsigned seed) {
    tokens_.clear();
    buffers_.clear();
    for (int r = 0; r < shape_.ranks; ++r) {
      int const tokens = tokens_of(shape_.max_tokens, r, seed);
      tokens_.push_back(make_tokens(r, tokens, shape_.hidden, shape_.topk, shape_.num_experts, shape_.ranks, routing_, seed));
      buffers_.push_back(make_buffers(tokens_.back(), shape_.hidden, shape_.local_experts(), y_rows_));
    }
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void expect_good(int parity, int routing_parity = -1) {
    group_->synchronize_and_check();
    for (int r = 0; r < shape_.ranks; ++r) {
      auto const i = static_cast<std::size_t>(r);
      EXPECT_EQ(check_high_throughput_rows(calls_[i], tokens_, r, parity, routing_parity >= 0 ? routing_parity : parity, 1), "");
      EXPECT_EQ(check_outputs<moe::quantization::ScaleFloor::amax_1e10>(tokens_[i], buffers_[i], r, shape_.hidden, shape_.topk,
                                                                        shape_.local_experts(), shape_.ranks, shape_.fp8, true, 1),
                "");
    }
  }
  RankGroup& group() { return *group_; }
  RankBuffers& buffer(int r) { return buffers_[static_cast<std::size_t>(r)]; }
  Calls& calls(int r) { return calls_[static_cast<std::size_t>(r)]; }
  Shape const& shape() const { return shape_; }

 protected:
  SimulatedHighThroughput(Shape const& shape, Routing routing, std::uint64_t timeout, bool programmatic)
      : shape_(shape), routing_(routing), group_(std::make_unique<RankGroup>(shape.ranks, true, Calls::window_bytes(shape), timeout)) {
    for (int r = 0; r < shape.ranks; ++r) calls_.emplace_back(group_->view(r), shape_, programmatic);
  }

  Shape shape_;
  Routing routing_;
  std::size_t y_rows_ = 0;  ///< that experts write outside the window
  std::unique_ptr<RankGroup> group_;
  std::vector<Calls> calls_;
  std::vector<RankTokens> tokens_;
  std::vector<RankBuffers> buffers_;
};

}  // namespace moe_test
