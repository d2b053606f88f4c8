// SPDX-License-Identifier: Apache-2.0
// experts/hopper/tuning.hpp: which tiles and which kernel a layer takes for a number of tokens. Plain host C++.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "moe/experts/hopper/common/problem.hpp"
#include "moe/experts/hopper/tuning_table.hpp"

namespace moe::hopper {

/// A choice made by hand, for more than `above` and up to `rows` expected rows per expert; it takes precedence over the measured one.
struct HandChoice {
  std::int64_t above;
  TileChoice tile;
};

// From sustained runs of one candidate alone: docs/log/hopper.md, "Tiles chosen by hand", has the times of every shape.
inline constexpr HandChoice kHandChoices[] = {
    // If there are few tiles, K is split only with tiles of 96 rows. mixtral-8x7b, 64 rows: 739 us, with tiles of 160 rows 757.
    {52, {Scheme::bf16, 82, 96, 1}},
    // In clusters an expert has an even number of tiles. qwen3-30b, 192 rows: 536 us, without clusters 571; 360 rows: 1067, without 1042.
    {160, {Scheme::bf16, 310, 160, 2}},
    // qwen3-30b, 512 rows: 1208 us, without clusters 1246.
    {440, {Scheme::bf16, kAnyRows, 160, 2}},
    // fp8_block takes tiles of 128 rows without clusters at any number of rows: change 36 on that page.
};

/// Most bytes of weights of one token's experts for which matrix-vector products in one kernel are taken: 1.5 times those of the largest
/// shape measured, mixtral-8x7b in bf16, 704 MB: 169.3 us, with the layer kernel 175.5 (docs/log/hopper.md, "One token").
constexpr std::int64_t one_token_bytes(Scheme scheme) { return 528'000'000LL * element_bytes(scheme); }

/// The tile for that many expected rows per expert. A scheme without measurements takes those of one with like tiles: f16 and int8_row
/// (which has no clusters) bf16's, fp8_row those of fp8_block.
constexpr TileChoice tile_choice(Scheme scheme, std::int64_t rows) {
  Scheme const measured = is_fp8(scheme) ? Scheme::fp8_block : Scheme::bf16;
  for (HandChoice const& hand : kHandChoices) {
    if (hand.tile.scheme == measured && rows > hand.above && rows <= hand.tile.rows) return hand.tile;
  }
  for (TileChoice const& c : kMeasuredTiles) {
    if (c.scheme == measured && rows <= c.rows) return c;
  }
  return {measured, kAnyRows, most_rows(scheme), 1};
}

/// The tile choice for that many tokens; `rows` is the expected rows of one expert. `quantises`: x has 16-bit elements and the call
/// quantises it, as fp8_block does without x_scales.
constexpr Tuning choose_tuning(LocalShape const& shape, Scheme scheme, int max_tokens, bool quantises) {
  Tuning t{};
  long long const slots = static_cast<long long>(max_tokens) * shape.topk;
  long long const rows = slots / (shape.num_experts > 0 ? shape.num_experts : 1);
  if (max_tokens <= 16) {  // an expert has at most max_tokens rows
    t.tile_rows = max_tokens <= 8 ? 8 : 16;
  } else {
    TileChoice const choice = tile_choice(scheme, rows);
    bool const blocks = choice.tile_rows > most_rows(scheme) && scheme == Scheme::fp8_block;
    t.tile_rows = blocks ? kBlockRows : std::min(choice.tile_rows, most_rows(scheme));
    t.cluster = scheme != Scheme::int8_row && (blocks || t.tile_rows == choice.tile_rows) ? choice.cluster : 1;
  }
  long long const token_bytes = 3LL * shape.topk * shape.hidden * shape.intermediate * element_bytes(scheme);
  t.one_token = max_tokens == 1 && token_bytes <= one_token_bytes(scheme);
  t.self_align = slots <= 128 && shape.num_experts <= 384 && t.tile_rows <= 64 &&
                 (!quantises || t.tile_rows <= kQuantizingRows || static_cast<long long>(max_tokens) * shape.hidden <= 32768);
  return t;
}
constexpr Tuning choose_tuning(LocalShape const& shape, Scheme scheme, int max_tokens) {
  return choose_tuning(shape, scheme, max_tokens, scheme == Scheme::fp8_block);
}

/// The tile choice for the batched format, by the expected rows of an expert.
inline Tuning choose_batched_tuning(LocalShape shape, Scheme scheme, int expected_rows, int capacity) {
  shape.topk = 1;
  Tuning t = choose_tuning(shape, scheme, shape.num_experts * std::clamp(expected_rows, 1, std::max(1, capacity)));
  // A tile that is one row too small reads an expert's weights twice: leave room for the rows that random routing gives nearly every
  // expert.
  double const likely = expected_rows + 2.8 * std::sqrt(static_cast<double>(std::max(expected_rows, 0)));
  if (likely <= 16) t.tile_rows = likely <= 8 ? 8 : 16;
  return t;
}

/// The choice changed so that each row's sums have one order: K is not split, and the special kernels for one token and for many rows of
/// fp8 are not used.
constexpr Tuning invariant(Tuning t, Scheme scheme) {
  if (t.tile_rows > most_rows(scheme)) {
    t.tile_rows = most_rows(scheme);
    t.cluster = 1;
  }
  t.max_splits = 1;
  t.one_token = false;
  return t;
}

}  // namespace moe::hopper
