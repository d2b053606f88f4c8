// SPDX-License-Identifier: Apache-2.0
// tests/unit/backend_exchange_shapes_test.cpp: the checks of the device exchanges before they use a GPU, the layout of their windows, the
// words that ranks compare.
#include <gtest/gtest.h>

#include <set>
#include <string>

#include "expect_error.hpp"
#include "moe/backends/window/device/high_throughput/layout.hpp"
#include "moe/backends/window/device/low_latency/layout.hpp"

namespace {

using moe::ErrorCode;
using moe::detail::first_token;
using moe::detail::high_throughput_planners;
using moe::detail::HighThroughputLayout;
using moe::detail::HighThroughputShape;
using moe::detail::LowLatencyCounters;
using moe::detail::LowLatencyLayout;
using moe::detail::LowLatencyShape;
using moe_test::expect_error;

LowLatencyShape low() {
  LowLatencyShape s;
  s.ranks = 8;
  s.max_tokens = 128;
  s.hidden = 7168;
  s.topk = 8;
  s.num_experts = 256;
  return s;
}
HighThroughputShape high() {
  HighThroughputShape s;
  s.ranks = 8;
  s.max_tokens = 4096;
  s.hidden = 7168;
  s.topk = 8;
  s.num_experts = 256;
  return s;
}

template <class Shape, class Change>
std::string refused(ErrorCode code, Shape s, Change&& change) {
  change(s);
  return expect_error(code, [&] { s.check(); });
}

TEST(ExchangeShapes, T12_T20_WhatLowLatencyRefuses) {
  low().check();
  auto expect = [](ErrorCode code, auto&& change, char const* sentence) { EXPECT_EQ(refused(code, low(), change), sentence); };
  expect(ErrorCode::unsupported, [](auto& s) { s.hidden = 7160; }, "low_latency: hidden 7160 is not a multiple of 16 up to 16384");
  expect(ErrorCode::unsupported, [](auto& s) { s.hidden = 0; }, "low_latency: hidden 0 is not a multiple of 16 up to 16384");
  expect(ErrorCode::unsupported, [](auto& s) { s.hidden = 32768; }, "low_latency: hidden 32768 is not a multiple of 16 up to 16384");
  expect(ErrorCode::config, [](auto& s) { s.topk = 0; }, "low_latency: top_k 0 is out of range [1, 32]");
  expect(ErrorCode::config, [](auto& s) { s.topk = 33; }, "low_latency: top_k 33 is out of range [1, 32]");
  expect(ErrorCode::unsupported, [](auto& s) { s.num_experts = 255; }, "low_latency: 255 experts do not divide by 8 ranks");
  expect(ErrorCode::unsupported, [](auto& s) { s.num_experts = 4096; }, "low_latency: 4096 experts, at most 2048");
  expect(ErrorCode::unsupported, [](auto& s) { s.ranks = 65; }, "low_latency: 65 ranks, at most 64");
  expect(ErrorCode::config, [](auto& s) { s.max_tokens = 0; }, "low_latency: max_tokens_per_rank 0 must be at least 1");
  expect(ErrorCode::config, [](auto& s) { s.blocks = 161; }, "low_latency: 161 blocks, at most 160");
  expect(ErrorCode::capacity, [](auto& s) { s.max_tokens = 200'000; }, "low_latency: 200000 tokens x 8 exceed the count word");
  expect(
      ErrorCode::config, [](auto& s) { s.masks = s.per_rank = true; },
      "low_latency: masks for dead ranks need a row for each (token, expert)");
  auto const counted = [&](auto&& change) {
    expect(
        ErrorCode::config,
        [&](auto& s) {
          s.arriving = true;
          change(s);
        },
        "low_latency: rows are counted where they come without masks, in a row for each (token, expert), from at most 32 ranks");
  };
  counted([](auto& s) { s.masks = true; });
  counted([](auto& s) { s.per_rank = true; });
  counted([](auto& s) { s.ranks = 64; });
}

TEST(ExchangeShapes, T12_T20_WhatHighThroughputRefuses) {
  high().check();
  auto expect = [](ErrorCode code, auto&& change, char const* sentence) { EXPECT_EQ(refused(code, high(), change), sentence); };
  expect(ErrorCode::unsupported, [](auto& s) { s.hidden = 100; }, "high_throughput: hidden 100 is not a multiple of 16 up to 16384");
  expect(ErrorCode::unsupported, [](auto& s) { s.ranks = 33; }, "high_throughput: 33 ranks, at most 32");
  expect(ErrorCode::unsupported, [](auto& s) { s.num_experts = 12; }, "high_throughput: 12 experts do not divide by 8 ranks");
  expect(ErrorCode::unsupported, [](auto& s) { s.num_experts = 2048; }, "high_throughput: 2048 experts, at most 1024");
  expect(ErrorCode::config, [](auto& s) { s.topk = 40; }, "high_throughput: top_k 40 is out of range [1, 32]");
  expect(ErrorCode::config, [](auto& s) { s.blocks = 0; }, "high_throughput: 0 blocks, at most 160");
  expect(ErrorCode::config, [](auto& s) { s.alignment = 0; }, "high_throughput: expert alignment 0 must be at least 1");
  expect(ErrorCode::config, [](auto& s) { s.parities = 3; }, "high_throughput: 3 parities, 1 or 2");
  expect(ErrorCode::config, [](auto& s) { s.column_blocks = 9; }, "high_throughput: 9 column blocks, at most 8");
  expect(ErrorCode::config, [](auto& s) { s.column_blocks = -1; }, "high_throughput: -1 column blocks, at most 8");
  expect(ErrorCode::capacity, [](auto& s) { s.max_tokens = 200'000; }, "high_throughput: 200000 tokens x 8 exceed the count word");
}

// Every value that ranks must share changes the tag that travels with the counts.
TEST(ExchangeShapes, T12_TagsTellShapesApart) {
  std::set<std::uint32_t> tags{low().tag()};
  auto add = [&](auto&& change) {
    LowLatencyShape s = low();
    change(s);
    tags.insert(s.tag());
  };
  add([](auto& s) { s.ranks = 4; });
  add([](auto& s) { s.max_tokens = 127; });
  add([](auto& s) { s.hidden = 7184; });
  add([](auto& s) { s.topk = 7; });
  add([](auto& s) { s.num_experts = 264; });
  add([](auto& s) { s.fp8 = false; });
  add([](auto& s) { s.per_rank = true; });
  add([](auto& s) { s.blocks = 64; });
  add([](auto& s) { s.masks = true; });
  add([](auto& s) { s.combine = moe::backends::CombineFormat::fp8; });
  add([](auto& s) { s.combine = moe::backends::CombineFormat::logfmt; });
  add([](auto& s) { s.layer = 1; });
  add([](auto& s) { s.arriving = true; });
  EXPECT_EQ(tags.size(), 14U);
  HighThroughputShape a = high(), b = high();
  b.layer = 1;
  EXPECT_NE(a.tag(), b.tag());
  std::set<std::uint32_t> columns;
  for (int blocks : {0, 1, 2, 4, 7}) {
    for (bool arriving : {false, true}) {
      for (int parities : {1, 2}) {
        a.column_blocks = blocks;
        a.arriving = arriving;
        a.parities = parities;
        columns.insert(a.tag());
      }
    }
  }
  EXPECT_EQ(columns.size(), 20U);
}

// Blocks of whole 256 columns that cover every width, as many as asked for where the width allows.
TEST(ExchangeShapes, ColumnBlocksCoverEveryWidth) {
  HighThroughputShape s = high();
  for (s.hidden = 16; s.hidden <= 16384; s.hidden += 16) {
    for (s.column_blocks = 1; s.column_blocks <= moe::comm::kMaxColumnBlocks; ++s.column_blocks) {
      SCOPED_TRACE(moe::text("hidden ", s.hidden, ", at most ", s.column_blocks, " blocks"));
      ASSERT_EQ(s.columns() % 256, 0);
      ASSERT_GE(s.num_column_blocks(), 1);
      ASSERT_LE(s.num_column_blocks(), s.column_blocks);
      ASSERT_GE(s.num_column_blocks() * s.columns(), s.hidden);
      ASSERT_LT((s.num_column_blocks() - 1) * s.columns(), s.hidden);
      ASSERT_LT(s.columns(), s.hidden / s.column_blocks + 257);
    }
  }
  auto const blocks = [&](int hidden, int most) {
    s.hidden = hidden;
    s.column_blocks = most;
    return std::pair(s.num_column_blocks(), s.columns());
  };
  EXPECT_EQ(blocks(7168, 4), std::pair(4, 1792));
  EXPECT_EQ(blocks(4096, 4), std::pair(4, 1024));
  EXPECT_EQ(blocks(512, 4), std::pair(2, 256));
  EXPECT_EQ(blocks(2944, 5), std::pair(4, 768));
}

// Words of column blocks are there only for a shape that has such blocks, and add less than a page for each parity.
TEST(ExchangeShapes, ColumnBlocksTakeFewWords) {
  HighThroughputShape s = high();
  moe::detail::HighThroughputLayout const plain(s);
  s.column_blocks = 4;
  moe::detail::HighThroughputLayout const with(s);
  EXPECT_EQ(plain.complete[1], 0U);
  std::size_t const rounds = 768, round = 256, words = 256;  // u32 [160], [1] and [4][8], each in whole 256 bytes
  EXPECT_EQ(with.bytes - plain.bytes, 2 * (rounds + round + words));
  EXPECT_EQ(with.round[0], with.finished[0] + rounds);
  EXPECT_EQ(with.complete[0], with.round[0] + round);
  EXPECT_EQ(with.finished[1], with.complete[0] + words);
  EXPECT_EQ(with.counts[0], with.finished[1] + rounds + round + words);
}

// Sizes beyond 2^31, and contiguous parts: a buffer set begins where the previous one ends.
TEST(ExchangeShapes, WindowsAreLaidOutIn64Bits) {
  LowLatencyShape s = low();
  s.max_tokens = 1024;
  LowLatencyLayout const first(s);
  EXPECT_GT(first.bytes, std::size_t{1} << 33);  // 32 experts x 8192 rows x (7168 + 2 x 7168 bytes) x 2
  LowLatencyLayout const second(s, first.bytes);
  EXPECT_EQ(second.sent, first.bytes);
  EXPECT_EQ(second.bytes - second.sent, first.bytes - moe::comm::kWindowControlBytes);
  for (auto format : {moe::backends::CombineFormat::fp8, moe::backends::CombineFormat::logfmt}) {
    s.combine = format;
    LowLatencyLayout const coded(s);
    EXPECT_EQ(coded.output_bytes, format == moe::backends::CombineFormat::fp8 ? 7168 : 56 * 256);
    EXPECT_GT(coded.headers[0], coded.outputs[0]);
  }
  HighThroughputShape h = high();
  h.max_tokens = 32768;
  EXPECT_GT(HighThroughputLayout(h).bytes, std::size_t{1} << 33);
}

// A shape that counts its rows has counters behind its other parts, which do not move; a shape without has none.
TEST(ExchangeShapes, CountersOfArrivingRowsLieBehindTheRest) {
  LowLatencyShape s = low();
  LowLatencyLayout const plain(s);
  EXPECT_EQ(LowLatencyCounters(s, plain.bytes).bytes, plain.bytes);
  s.arriving = true;
  EXPECT_EQ(LowLatencyLayout(s).bytes, plain.bytes);
  LowLatencyCounters const c(s, plain.bytes);
  std::size_t const words = 8 * 32;  // ranks x local experts
  EXPECT_EQ(c.arrived[0], plain.bytes);
  EXPECT_EQ(c.expected[0], c.arrived[0] + 4 * words);
  EXPECT_EQ(c.arrived[1], c.expected[0] + 8 * words);
  EXPECT_EQ(c.bytes, c.expected[1] + 8 * words);
}

// Token ranges are contiguous. If there are more tokens than warps in total, each block has a token for each of its warps.
TEST(ExchangeShapes, BlocksShareTokensAndWarpsShareWork) {
  for (int tokens : {0, 1, 15, 256, 257, 4096, 200'000'000}) {
    for (int blocks : {1, 3, 16, 160}) {
      EXPECT_EQ(first_token(tokens, 0, blocks), 0);
      EXPECT_EQ(first_token(tokens, blocks, blocks), tokens);
      for (int b = 0; b < blocks; ++b) {
        int const n = first_token(tokens, b + 1, blocks) - first_token(tokens, b, blocks);
        EXPECT_GE(n, tokens / blocks);
        EXPECT_LE(n, tokens / blocks + 1);
      }
    }
  }
  EXPECT_EQ(high_throughput_planners(260, 16), 9);
  EXPECT_EQ(high_throughput_planners(1056, 16), 12);
  EXPECT_EQ(high_throughput_planners(20, 16), 1);
  EXPECT_EQ(high_throughput_planners(260, 2), 1);
  EXPECT_EQ(high_throughput_planners(260, 1), 1);
}

TEST(ExchangeShapes, RefusalsAndFailuresHaveTheirMessages) {
  auto sentence = [](moe::comm::FailureRecord const& f, ErrorCode code) {
    std::string const message = expect_error(code, [&] { moe::comm::throw_if_failed(f); });
    return message.substr(0, message.find(" ("));
  };
  auto const code = [](ErrorCode c) { return 1U + static_cast<std::uint32_t>(c); };
  EXPECT_EQ(sentence({code(ErrorCode::capacity), 1, 0, 3, 7, 0, 64, 40, 1}, ErrorCode::capacity),
            "rank 3 would receive 64 rows, capacity 40");
  EXPECT_EQ(sentence({code(ErrorCode::capacity), 1, 0, 3, 7, 0, code(ErrorCode::capacity), 0, 1}, ErrorCode::capacity),
            "rank 3 refused its arguments with E_CAPACITY");
  EXPECT_EQ(sentence({code(ErrorCode::peer), 1, 0, 3, 7, 0, code(ErrorCode::argument), 0, 1}, ErrorCode::peer),
            "rank 3 refused its arguments with E_ARG");
  EXPECT_EQ(sentence({code(ErrorCode::peer), 1, 0, 3, 7, 0, code(ErrorCode::peer), 0, 1}, ErrorCode::peer), "rank 3 abandoned the call");
  EXPECT_EQ(sentence({code(ErrorCode::timeout), 2, 0, 3, 7, 5, moe::comm::kProcessEnded, 0, 0}, ErrorCode::timeout),
            "rank 3 did not arrive in round 7: its process has ended");
  EXPECT_EQ(sentence({code(ErrorCode::timeout), 2, 0, 3, 7, 5, 0, 0, 0}, ErrorCode::timeout),
            "rank 3 did not arrive: expected round 7, observed 5");
  EXPECT_EQ(sentence({code(ErrorCode::mismatch), 1, 0, 3, 7, 5, 9, 0, 0}, ErrorCode::mismatch),
            "rank 3 runs another shape: header tag 5, expected 9");
  EXPECT_EQ(sentence({code(ErrorCode::peer), 1, 0, 3, 7, 5, 0, 0, 0}, ErrorCode::peer), "the group was aborted: rank 3 is missing");
  moe::comm::throw_if_failed({});
  moe::comm::throw_if_over({code(ErrorCode::capacity), 1, 0, 3, 7, 0, 64, 40, 1});  // the group has no error
  expect_error(ErrorCode::timeout, [&] { moe::comm::throw_if_over({code(ErrorCode::timeout), 2, 0, 3, 7, 5, 0, 0, 0}); });
}

}  // namespace
