// SPDX-License-Identifier: Apache-2.0
// tests/gpu/shared_gpu.cuh: what tests of exchanges between ranks that share one GPU have in common: process start, delays, graphs, and
// checks: after a missing rank, after ranks disagreed, that repeated rounds are equal, that rounds wrap.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "moe/core/cuda_graph.hpp"
#include "moe/core/cuda_space.hpp"
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

/// Rounds of a run of 4 ranks whose numbers pass the ends of 31 and of 32 bits. `counts`: those of one parity.
template <class Run>
void expect_rounds_wrap(Run& run, std::size_t counts) {
  for (std::uint32_t start : {0x7ffffffdU, 0xfffffffdU}) {
    for (int r = 0; r < 4; ++r) {
      auto const& at = run.calls(r).layout();
      std::vector<std::uint32_t> const words((at.counts[0] - at.sent) / 4, start);  // rounds and flags lie before the counts
      moe::check_cuda(cudaMemcpy(run.calls(r).template own<char>(at.sent), words.data(), words.size() * 4, cudaMemcpyHostToDevice), "copy");
      for (int p = 0; p < 2; ++p) {
        std::vector<std::uint64_t> const tagged(counts, static_cast<std::uint64_t>(start) << 32);
        moe::check_cuda(cudaMemcpy(run.calls(r).template own<char>(at.counts[p]), tagged.data(), tagged.size() * 8, cudaMemcpyHostToDevice),
                        "copy");
      }
    }
    for (unsigned i = 0; i < 6; ++i) {
      run.bring(i);
      run.round(static_cast<int>(i & 1U));
      run.expect_good(static_cast<int>(i & 1U));
    }
  }
}

}  // namespace moe_test
