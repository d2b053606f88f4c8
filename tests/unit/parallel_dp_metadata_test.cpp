// SPDX-License-Identifier: Apache-2.0
// tests/unit/parallel_dp_metadata_test.cpp: token counts, chunks, scopes, the step vote (cases P10-P12, P15, P16).
#include "moe/parallel/dp_metadata.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <numeric>
#include <stdexcept>
#include <vector>

#include "expect_error.hpp"

namespace {

using moe::ChunkMode;
using moe::DpMetadata;
using moe::ErrorCode;
using moe_test::expect_error;
using Counts = std::vector<std::int32_t>;

DpMetadata metadata_of(Counts const& counts, int sp = 1) {
  DpMetadata metadata(static_cast<int>(counts.size()), sp);
  metadata.set(counts, 0, counts[0]);
  return metadata;
}

TEST(DpMetadata, P10_Table) {
  DpMetadata const a = metadata_of({5, 3, 0, 1});
  EXPECT_EQ(a.sp_tokens(), (Counts{5, 3, 0, 1}));
  EXPECT_EQ(a.cu_tokens(), (std::vector<std::int64_t>{5, 8, 8, 9}));
  EXPECT_EQ(a.max_tokens(), 5);
  ASSERT_EQ(a.num_chunks(2), 3);
  ASSERT_EQ(a.num_chunks(2, ChunkMode::min_one), 3);
  EXPECT_EQ(a.chunk_sizes(0, 2), (Counts{2, 2, 0, 1}));
  EXPECT_EQ(a.chunk_sizes(1, 2), (Counts{2, 1, 0, 0}));
  EXPECT_EQ(a.chunk_sizes(2, 2), (Counts{1, 0, 0, 0}));
  EXPECT_EQ(a.chunk_sizes(0, 2, ChunkMode::min_one), (Counts{2, 2, 1, 1}));
  EXPECT_EQ(a.chunk_sizes(1, 2, ChunkMode::min_one), (Counts{2, 1, 1, 1}));
  EXPECT_EQ(a.chunk_sizes(2, 2, ChunkMode::min_one), (Counts{1, 1, 1, 1}));

  DpMetadata const b = metadata_of({7, 4}, 2);
  EXPECT_EQ(b.sp_tokens(), (Counts{4, 4, 2, 2}));
  EXPECT_EQ(b.cu_tokens(), (std::vector<std::int64_t>{4, 6}));
  ASSERT_EQ(b.num_chunks(3), 2);
  EXPECT_EQ(b.chunk_sizes(0, 3), (Counts{3, 3, 2, 2}));
  EXPECT_EQ(b.chunk_sizes(1, 3), (Counts{1, 1, 0, 0}));
  EXPECT_EQ(b.chunk_sizes(0, 3, ChunkMode::min_one), (Counts{3, 3, 2, 2}));
  EXPECT_EQ(b.chunk_sizes(1, 3, ChunkMode::min_one), (Counts{1, 1, 1, 1}));

  DpMetadata const c = metadata_of({0, 0});
  EXPECT_EQ(c.num_chunks(4), 0);
  ASSERT_EQ(c.num_chunks(4, ChunkMode::min_one), 1);
  EXPECT_EQ(c.chunk_sizes(0, 4, ChunkMode::min_one), (Counts{1, 1}));
}

RC_GTEST_PROP(DpMetadata, ExactChunksSumToTheTokens, ()) {
  auto const counts = *rc::gen::nonEmpty(rc::gen::container<Counts>(rc::gen::inRange(0, 200)));
  int const sp = *rc::gen::inRange(1, 5);
  int const chunk = *rc::gen::inRange(1, 70);
  DpMetadata const metadata = metadata_of(counts, sp);
  Counts sum(metadata.sp_tokens().size(), 0);
  for (int c = 0; c < metadata.num_chunks(chunk); ++c) {
    Counts const sizes = metadata.chunk_sizes(c, chunk);
    RC_ASSERT(*std::max_element(sizes.begin(), sizes.end()) > 0);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += sizes[i];
  }
  RC_ASSERT(sum == metadata.sp_tokens());
  RC_ASSERT(std::is_sorted(metadata.cu_tokens().begin(), metadata.cu_tokens().end()));
  RC_ASSERT(metadata.cu_tokens().back() * sp == std::accumulate(sum.begin(), sum.end(), std::int64_t{0}));
}

TEST(DpMetadata, P11_ScopesNestAndRestore) {
  DpMetadata metadata = metadata_of({5, 3, 0, 1});
  expect_error(ErrorCode::state, "local_sizes are only known inside", [&] { metadata.local_sizes(); });
  {
    auto outer = metadata.sp_scope();
    EXPECT_EQ(metadata.local_sizes(), (Counts{5, 3, 0, 1}));
    {
      auto inner = metadata.chunk_scope(1, 2);
      EXPECT_EQ(metadata.local_sizes(), (Counts{2, 1, 0, 0}));
      expect_error(ErrorCode::state, "innermost first", [&] { outer.close(); });
      expect_error(ErrorCode::state, "cannot change inside 2 open scopes", [&] { metadata.set(Counts{5, 3, 0, 1}, 0, 5); });
      inner.close();
      EXPECT_EQ(metadata.local_sizes(), (Counts{5, 3, 0, 1}));
      expect_error(ErrorCode::state, "already closed", [&] { inner.close(); });
    }
    try {
      [[maybe_unused]] auto const unwound = metadata.chunk_scope(0, 2, ChunkMode::min_one);  // closed by the exception
      EXPECT_EQ(metadata.local_sizes(), (Counts{2, 2, 1, 1}));
      throw std::runtime_error("in the middle of a chunk");
    } catch (std::runtime_error const&) {
    }
    EXPECT_EQ(metadata.local_sizes(), (Counts{5, 3, 0, 1}));
  }
  expect_error(ErrorCode::state, "local_sizes are only known inside", [&] { metadata.local_sizes(); });
  expect_error(ErrorCode::argument, "chunk 3 is out of range [0, 3)", [&] { auto s = metadata.chunk_scope(3, 2); });
  expect_error(ErrorCode::config, "chunk size must be greater than 0, is 0", [&] { auto s = metadata.chunk_scope(0, 0); });
}

TEST(DpMetadata, P12_OwnCountMustMatch) {
  DpMetadata metadata(2, 1);
  expect_error(ErrorCode::argument, "token count mismatch: metadata says 3 for dp_rank 1, the batch has 4",
               [&] { metadata.set(Counts{5, 3}, 1, 4); });
  expect_error(ErrorCode::argument, "token count mismatch: a padded step", [&] { metadata.set(Counts{5, 3}, 1, 3, true); });
  expect_error(ErrorCode::argument, "num_tokens[0] must be at least 0, is -1", [&] { metadata.set(Counts{-1, 3}, 1, 3); });
  expect_error(ErrorCode::argument, "num_tokens has 3 entries, dp_size is 2", [&] { metadata.set(Counts{5, 3, 1}, 1, 3); });
  expect_error(ErrorCode::argument, "dp_rank 2 is out of range", [&] { metadata.set(Counts{5, 3}, 2, 3); });
  metadata.set(Counts{8, 8}, 1, 8, true);
  EXPECT_TRUE(metadata.is_padded());
}

TEST(DpMetadata, P16_AnIdleRankSeesTheSameChunks) {
  Counts const counts{600, 0};
  DpMetadata busy(2, 1), idle(2, 1);
  busy.set(counts, 0, 600);
  idle.set(counts, 1, 0);
  ASSERT_EQ(busy.num_chunks(256), 3);
  ASSERT_EQ(idle.num_chunks(256), 3) << "the idle rank must join every chunk or the group hangs";
  for (int c = 0; c < 3; ++c) {
    EXPECT_EQ(busy.chunk_sizes(c, 256), idle.chunk_sizes(c, 256));
    EXPECT_EQ(idle.chunk_size(1, c, 256), 0);
  }
}

std::vector<std::optional<moe::StepVote>> votes_of(std::vector<moe::StepVote> const& votes) { return {votes.begin(), votes.end()}; }

TEST(StepVote, P15_UbatchCancelledWhenTheSmallestRankCannotFillIt) {
  auto const cancelled = moe::decide_step(votes_of({{10, 12, true, 0}, {3, 12, true, 0}}));
  EXPECT_FALSE(cancelled.ubatch) << "12 / 2 * 1 = 6 >= 3";
  auto const kept = moe::decide_step(votes_of({{10, 12, true, 0}, {7, 12, true, 0}}));
  EXPECT_TRUE(kept.ubatch) << "6 < 7";
  auto const edge = moe::decide_step(votes_of({{10, 12, true, 0}, {6, 12, true, 0}}));
  EXPECT_FALSE(edge.ubatch) << "6 >= 6";
}

TEST(StepVote, AgreementRules) {
  auto const mixed = moe::decide_step(votes_of({{10, 16, true, 2}, {12, 12, false, 1}}));
  EXPECT_FALSE(mixed.ubatch) << "one rank does not want it";
  EXPECT_EQ(mixed.graph_mode, 1);
  EXPECT_EQ(mixed.num_tokens, (Counts{16, 16})) << "a graph needs equal sizes";
  auto const plain = moe::decide_step(votes_of({{10, 10, true, 0}, {0, 0, false, 2}}));
  EXPECT_EQ(plain.graph_mode, 0);
  EXPECT_EQ(plain.num_tokens, (Counts{10, 0}));
  auto const split = moe::decide_step(votes_of({{10, 10, true, 0}, {8, 8, true, 0}}));
  EXPECT_TRUE(split.ubatch);
  EXPECT_EQ(split.num_tokens, (Counts{10, 10}));
}

TEST(StepVote, MissingRanksAreNamed) {
  auto votes = votes_of({{1, 1, false, 0}, {1, 1, false, 0}, {1, 1, false, 0}});
  votes[1].reset();
  expect_error(ErrorCode::timeout, "no vote on the step from DP rank 1", [&] { moe::decide_step(votes); });
  votes[2].reset();
  expect_error(ErrorCode::timeout, "DP rank 1, 2", [&] { moe::decide_step(votes); });
}

}  // namespace
