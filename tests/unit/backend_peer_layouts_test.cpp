// SPDX-License-Identifier: Apache-2.0
// tests/unit/backend_peer_layouts_test.cpp: OneSided, TwoSided and Pplx between GPUs before they use one: refused shapes, the words that
// ranks compare, how their windows are laid out.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "moe/backends/window/device/one_sided/exchange.hpp"
#include "moe/backends/window/device/pplx/exchange.hpp"
#include "moe/backends/window/device/two_sided/exchange.hpp"
#include "moe/quantization/none.hpp"

namespace {

using moe::ErrorCode;
using moe::detail::OneSidedLayout;
using moe::detail::PeerShape;
using moe::detail::PplxGroup;
using moe::detail::PplxLayout;
using moe::detail::TwoSidedLayout;
using moe::detail::TwoSidedQueues;

PeerShape shape() { return {"one_sided", 8, 1024, 7168, 8, 256, false, 64}; }

template <class Change>
std::string refused(ErrorCode code, Change&& change) {
  PeerShape s = shape();
  change(s);
  try {
    s.check();
  } catch (moe::Error const& e) {
    EXPECT_EQ(e.code(), code) << e.what();
    return e.message();
  }
  ADD_FAILURE() << "no error, expected " << moe::name(code);
  return "";
}

TEST(PeerShape, T12_WhatCannotWorkIsRefusedWithItsValue) {
  shape().check();
  EXPECT_EQ(refused(ErrorCode::unsupported, [](PeerShape& s) { s.ranks = 33; }), "one_sided: 33 ranks, at most 32");
  EXPECT_EQ(refused(ErrorCode::config, [](PeerShape& s) { s.max_tokens = 0; }), "one_sided: max_tokens_per_rank 0 must be at least 1");
  EXPECT_EQ(refused(ErrorCode::unsupported, [](PeerShape& s) { s.hidden = 7200; }),
            "one_sided: hidden 7200 is not a multiple of 128 up to 16384");
  EXPECT_EQ(refused(ErrorCode::config, [](PeerShape& s) { s.topk = 33; }), "one_sided: top_k 33 is out of range [1, 32]");
  EXPECT_EQ(refused(ErrorCode::unsupported, [](PeerShape& s) { s.num_experts = 255; }), "one_sided: 255 experts do not divide by 8 ranks");
  EXPECT_EQ(refused(ErrorCode::config, [](PeerShape& s) { s.blocks = 161; }), "one_sided: 161 blocks, at most 160");
  EXPECT_EQ(refused(ErrorCode::capacity, [](PeerShape& s) { s.max_tokens = 1 << 18; }),
            "one_sided: 262144 tokens x 8 exceed the count word");
}

TEST(PeerShape, T12_EveryValueThatRanksMustShareIsInTheTag) {
  std::vector<std::uint32_t> tags{shape().tag().value()};
  auto add = [&](auto&& change) {
    PeerShape s = shape();
    change(s);
    tags.push_back(s.tag().value());
  };
  add([](PeerShape& s) { s.name = "pplx"; });
  add([](PeerShape& s) { s.ranks = 4; });
  add([](PeerShape& s) { s.max_tokens = 1023; });
  add([](PeerShape& s) { s.hidden = 4096; });
  add([](PeerShape& s) { s.topk = 6; });
  add([](PeerShape& s) { s.num_experts = 512; });
  add([](PeerShape& s) { s.fp8 = true; });
  add([](PeerShape& s) { s.blocks = 32; });
  add([](PeerShape& s) { s.layer = 1; });
  add([](PeerShape& s) { s.placement = 7; });
  std::sort(tags.begin(), tags.end());
  EXPECT_EQ(std::adjacent_find(tags.begin(), tags.end()), tags.end());
}

struct Config : moe::LayerDefaults {
  using Act = moe::bf16;
  struct Activation {};
};
PeerShape shape_of(moe::ExpertPlacement const& placement) {
  moe::Shape<Config> const s({.hidden = 512, .intermediate = 128, .num_experts = placement.num_logical(), .topk = 2});
  return moe::backends::detail::peer_shape<moe::quantization::None>("one_sided", 4, s, 8, placement, 32);
}

TEST(PeerShape, T20_AnyPlacementAndItsHash) {
  using moe::ExpertPlacement;
  using moe::PlacementStrategy;
  EXPECT_EQ(shape_of(ExpertPlacement(16, 4)).num_experts, 16);
  EXPECT_EQ(shape_of(ExpertPlacement(13, 4)).num_experts, 16);  // four places on each rank
  EXPECT_EQ(shape_of(ExpertPlacement(3, 4, PlacementStrategy::round_robin, true)).num_experts, 4);
  EXPECT_EQ(shape_of(ExpertPlacement(16, 4)).tag().value(), shape_of(ExpertPlacement(16, 4)).tag().value());
  EXPECT_NE(shape_of(ExpertPlacement(16, 4)).tag().value(), shape_of(ExpertPlacement(16, 4, PlacementStrategy::round_robin)).tag().value());
  try {
    shape_of(ExpertPlacement(16, 8));
    ADD_FAILURE() << "no error";
  } catch (moe::Error const& e) {
    EXPECT_EQ(e.code(), ErrorCode::config);
  }
}

// A rank writes its refusals of consecutive rounds to different words, all in the window's control part.
TEST(Refusals, WordsOfNeighbouringRoundsDiffer) {
  using moe::comm::WindowControl;
  for (int rank : {0, 1, moe::comm::kMaxWindowRanks - 1}) {
    for (std::uint32_t round : {0U, 1U, 0xffffffffU}) {
      std::size_t const at = moe::comm::refusal_offset(round, rank);
      EXPECT_NE(at, moe::comm::refusal_offset(round + 1, rank));
      EXPECT_EQ(at, moe::comm::refusal_offset(round + 2, rank));
      EXPECT_GE(at, WindowControl::refused);
      EXPECT_LE(at + 4, WindowControl::waited);
    }
  }
  EXPECT_EQ(moe::comm::refusal_word(0x12345678U, moe::comm::refusal_code(ErrorCode::capacity)) & 0xffffffU, 0x345678U);
}

/// Regions do not overlap, begin on multiples of 256 behind the window's own part, and end where the layout does.
void expect_disjoint(std::vector<std::pair<std::size_t, std::size_t>> regions, std::size_t bytes) {
  std::sort(regions.begin(), regions.end());
  std::size_t end = moe::comm::kWindowControlBytes;
  for (auto const& [at, size] : regions) {
    EXPECT_GE(at, end);
    EXPECT_EQ(at % 256, 0U);
    end = at + size;
  }
  EXPECT_LE(end, bytes);
  EXPECT_LT(bytes - end, 256U);
}

TEST(OneSidedLayout, WorkspaceOfTheExample) {
  PeerShape const s = shape();  // docs/semantics/exchange.md §10: payload 14336 + 32 + 32 bytes per row, combine 14336
  OneSidedLayout const at(s);
  std::size_t const rows = 8 * 1024;
  std::vector<std::pair<std::size_t, std::size_t>> regions{{at.sent, 640}, {at.combined, 640}, {at.arrived, 4}, {at.ready, 32}};
  for (int p = 0; p < 2; ++p) {
    EXPECT_EQ(rows * (14336 + 32 + 32), 117'964'800U);
    EXPECT_EQ(rows * 14336, 117'440'512U);
    regions.insert(regions.end(), {{at.send_counters[p], 32},
                                   {at.counts[p], 64},
                                   {at.rows[p], rows * 14336},
                                   {at.scales[p], 0},
                                   {at.ids[p], rows * 32},
                                   {at.weights[p], rows * 32},
                                   {at.outputs[p], rows * 14336},
                                   {at.send_index[p], 1024 * 32}});
  }
  expect_disjoint(regions, at.bytes);
  EXPECT_LT(at.bytes, 2 * (117'964'800U + 117'440'512U) + 200'000U);
}

TEST(TwoSidedLayout, RecordsAndQueues) {
  PeerShape s = shape();
  s.name = "two_sided";
  s.blocks = 32;
  for (bool fp8 : {false, true}) {
    s.fp8 = fp8;
    TwoSidedQueues const q;
    TwoSidedLayout const at(s, q);
    EXPECT_EQ(at.record_scales, fp8 ? 7168 : 14336);
    EXPECT_EQ(at.record_ids, at.record_scales + (fp8 ? 224 : 0));
    EXPECT_EQ(at.record_bytes, fp8 ? 7552 : 14464);  // values, scales, 8 ids and weights, up to a line of 128 bytes
    EXPECT_EQ(at.returned_bytes, 14336);
    EXPECT_EQ(at.stage_bytes(), fp8 ? 14336 : 14464);
    EXPECT_LE(at.warps * at.stage_bytes(), 220 * 1024);
    EXPECT_EQ(at.queues, at.send_blocks * at.warps / s.ranks);
    EXPECT_GE(q.entry_bytes, at.record_bytes);
  }
  s.ranks = 32;
  s.blocks = 2;  // fewer warps than ranks: one queue, several peers a warp
  EXPECT_EQ(TwoSidedLayout(s, {}).queues, 1);
}

// Ranks that disagree compare count words, which must lie at the same offset on all of them.
TEST(TwoSidedLayout, T12_CountsLieInFrontOfWhatDependsOnSizes) {
  PeerShape s = shape();
  s.name = "two_sided";
  TwoSidedLayout const at(s, {});
  auto expect_same = [&](PeerShape const& other, TwoSidedQueues const& queues) {
    TwoSidedLayout const o(other, queues);
    for (int p = 0; p < 2; ++p) {
      EXPECT_EQ(o.counts[p], at.counts[p]);
    }
    EXPECT_NE(o.bytes, at.bytes);
  };
  expect_same(s, {.depth = 16});
  expect_same(s, {.entry_bytes = 128 * 1024});
  auto with = [&](auto&& change) {
    PeerShape other = s;
    change(other);
    return other;
  };
  expect_same(with([](PeerShape& o) { o.blocks = 8; }), {});
  expect_same(with([](PeerShape& o) { o.max_tokens = 512; }), {});
  expect_same(with([](PeerShape& o) { o.hidden = 4096; }), {});
  expect_same(with([](PeerShape& o) { o.topk = 4; }), {});
  expect_same(with([](PeerShape& o) { o.fp8 = true; }), {});
}

TEST(PplxLayout, GroupsShareOutTokensAndRoom) {
  PeerShape s = shape();
  s.name = "pplx";
  s.max_tokens = 129;
  PplxLayout const alone(s, {});
  EXPECT_EQ(alone.per_source, 129);
  EXPECT_EQ(alone.capacity, 8 * 129);
  PplxLayout const pairs(s, PplxGroup{2, false});
  EXPECT_EQ(pairs.per_source, 65);
  EXPECT_EQ(pairs.capacity, 8 * 65);
  EXPECT_LT(pairs.bytes, alone.bytes);
  std::size_t const rows = 8 * 32 * 65;
  std::size_t const slots = 129 * 8;
  std::vector<std::pair<std::size_t, std::size_t>> regions{
      {pairs.sent, 640}, {pairs.received, 640}, {pairs.arrived, 4}, {pairs.counts, 4 * 8 * 8 * 33}};
  for (int p = 0; p < 2; ++p) {
    regions.insert(regions.end(), {{pairs.round_of[p], 4},
                                   {pairs.incomplete[p], 4},
                                   {pairs.counters[p], 4 * 256},
                                   {pairs.source_slots[p], rows * 4},
                                   {pairs.back[p], slots * 4},
                                   {pairs.origins[p], rows * 4},
                                   {pairs.num_tokens[p], 128},
                                   {pairs.rows[p], rows * 14336},
                                   {pairs.scales[p], 0},
                                   {pairs.returned[p], slots * 14336},
                                   {pairs.batch[p], rows * 14336},
                                   {pairs.batch_scales[p], 0},
                                   {pairs.outputs[p], rows * 14336}});
  }
  expect_disjoint(regions, pairs.bytes);
}

}  // namespace
