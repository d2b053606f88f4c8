// SPDX-License-Identifier: Apache-2.0
// tests/gpu/shared_gpu.cuh: what tests of exchanges between ranks that share one GPU have in common: process start, delays, graphs, and
// checks: after a missing rank, after ranks disagreed, and that repeated rounds are equal.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "moe/core/cuda_graph.hpp"
#include "moe/core/error.hpp"
#include "tests/gpu/resident_ranks.hpp"
#include "tests/multigpu/exchange_ranks.cuh"

namespace moe_test {

/// For each rank a CUDA graph of the work that enqueue(rank) puts into the rank's stream.
class RankGraphs {
 public:
  template <class Enqueue>
  RankGraphs(RankGroup& group, Enqueue&& enqueue) : group_(&group) {
    for (int r = 0; r < group.size(); ++r) {
      graphs_.emplace_back(group.stream(r), [&] { enqueue(r); });
    }
  }
  RankGraphs(RankGraphs const&) = delete;
  RankGraphs& operator=(RankGraphs const&) = delete;
  ~RankGraphs() { group_->synchronize(); }
  /// Once on every rank.
  void launch() {
    for (int r = 0; r < group_->size(); ++r) {
      graphs_[static_cast<std::size_t>(r)].launch(group_->stream(r));
    }
  }

 private:
  RankGroup* group_;
  std::vector<moe::CudaGraph> graphs_;
};

/// After the last rank was missing: the others name it, one of them because its wait timed out.
inline void expect_last_rank_is_named(RankGroup const& group) {
  group.synchronize();
  int const absent = group.size() - 1;
  int timeouts = 0;
  for (int r = 0; r < absent; ++r) {
    try {
      group.check(r);
      ADD_FAILURE() << "rank " << r << " saw no failure";
    } catch (moe::TransportError const& e) {
      EXPECT_EQ(e.peer(), absent) << e.what();
      EXPECT_EQ(e.rank(), r);
      timeouts += e.code() == moe::ErrorCode::timeout ? 1 : 0;
      EXPECT_TRUE(e.code() == moe::ErrorCode::timeout || e.code() == moe::ErrorCode::peer) << e.what();
    }
  }
  EXPECT_GE(timeouts, 1);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

/// After ranks used different shapes or sizes.
inline void expect_mismatch(RankGroup const& group) {
  group.synchronize();
  int mismatches = 0;
  for (int r = 0; r < group.size(); ++r) {
    try {
      group.check(r);
    } catch (moe::TransportError const& e) {
      mismatches += e.code() == moe::ErrorCode::mismatch ? 1 : 0;
    }
  }
  EXPECT_GE(mismatches, 1);
}

/// Calls round(parity, delays) twenty times on the same input: the same bits each time.
template <class Run, class Round>
void expect_same_bits(Run& run, Round&& round) {
  std::vector<std::vector<std::uint16_t>> first;
  for (int i = 0; i < 20; ++i) {
    round(i & 1, static_cast<unsigned>(i));
    run.group().synchronize_and_check();
    for (int r = 0; r < run.group().size(); ++r) {
      auto out = run.buffer(r).out.host();
      if (i == 0) {
        first.push_back(std::move(out));
      } else {
        EXPECT_EQ(out, first[static_cast<std::size_t>(r)]) << "rank " << r << ", round " << i;
      }
    }
  }
}

}  // namespace moe_test
