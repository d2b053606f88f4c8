// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/a8/problem.hpp: the stored form of 4-bit weights for products in e4m3, sizes and refusals. Plain host C++.
//
// A brick is 64 weight rows by 128 of K: 4096 bytes of codes (thread t reads 16 bytes at 16 t: steps 0 and 1 of 32, rows r and r + 8, and
// 16 bytes at 2048 + 16 t: steps 2 and 3), then the scales, then 16 bytes of which the first word is of the whole brick:
//   mxfp4         a word per row (FoldedScales); the kind of the brick (kNormalBrick …)
//   int4          a word per row: two fp16 scales, of the first and the second 64 of K; the float32 factor that multiplies all scales. They
//                 are relative to a power of two of their row (row_factors.hpp)
//   int4_32       two words per row, the first words of all rows before the second: four fp16 scales, of 32 of K each; the factor
//   int4_zero, int4_32_zero  as int4 and int4_32; behind the scales a word per row: the zero points of the four 32 of K, a byte each
// Rows are ordered, and bricks lie side by side, as in experts/hopper/w4/problem.hpp; int4's are followed by the factors of their rows.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/w4/problem.hpp"

namespace moe::hopper::w4a8 {

inline constexpr int kDepth = 128;  ///< of K of a brick; activations and the intermediate have one scale for as many
inline constexpr int kCodeBytes = 4096;
inline constexpr int kWordBytes = 256;  ///< a word per row
/// Words of scales per row.
MOE_HD constexpr int row_words(W4Scheme s) { return s == W4Scheme::int4_32 || s == W4Scheme::int4_32_zero ? 2 : 1; }
MOE_HD constexpr int scale_bytes(W4Scheme s) { return (row_words(s) + (has_zero_points(s) ? 1 : 0)) * kWordBytes; }
MOE_HD constexpr int stored_brick_bytes(W4Scheme s) { return kCodeBytes + scale_bytes(s) + 16; }
/// Most rows of a tile. A row takes one register a thread for its sums, and half a register (one group a brick) or a whole one for the
/// products that are scaled apart. int4's tables, its zero points and the code of any activation leave fewer.
constexpr int most_tile_rows(W4Scheme s, bool any) {
  if (has_zero_points(s)) return 48;
  return is_e2m1(s) && !any ? 80 : 64;
}

constexpr int padded(int columns) { return (columns + kDepth - 1) / kDepth * kDepth; }

/// Bytes of the bricks of one matrix of `rows` (2I or H) by `cols`, multiples of 64 and 128.
MOE_HD constexpr std::int64_t bricks_bytes(W4Scheme s, std::int64_t rows, std::int64_t cols) {
  return rows / kBrickRows * (cols / kDepth) * stored_brick_bytes(s);
}
/// The same with the factors of rows.
MOE_HD constexpr std::int64_t packed_bytes(W4Scheme s, std::int64_t rows, std::int64_t cols) {
  return w4a8::bricks_bytes(s, rows, cols) + (has_row_factors(s) ? 4 * rows : 0);
}

/// Groups of a row's 128 of K whose sums are scaled apart.
constexpr int sums_of(W4Scheme s, int w13_group, int w2_group) {
  if (s == W4Scheme::mxfp4) return 1;
  if (row_words(s) == 2) return 4;
  return w13_group % kDepth == 0 && w2_group % kDepth == 0 ? 1 : 2;
}

/// E_CONFIG unless the kernels can run these sizes, and groups of the weights.
inline void check_sizes(LocalShape const& s, W4Scheme scheme, W4Weights const& w) {
  if (scheme == W4Scheme::nvfp4 || scheme == W4Scheme::int8) {
    throw Error(ErrorCode::config,
                text("hopper_w4a8: weights in ", name(scheme), " under rows of e4m3 have no kernels, mxfp4 and int4 have"));
  }
  w4::check_sizes("hopper_w4a8", s, scheme, kBrickRows, intermediate_multiple(scheme));
  w4::check_groups("hopper_w4a8", s, scheme, w);
}
/// The same, and E_ARG for null or misaligned weights.
inline void check(LocalShape const& s, W4Scheme scheme, W4Weights const& w) {
  check_sizes(s, scheme, w);
  w4::check_stored("hopper_w4a8", w);
}

/// The workspace of W4A16Layer for rows of whole groups: its 16-bit intermediate has room for the e4m3 codes and their scales.
constexpr W4Workspace plan_workspace(LocalShape s, int max_tokens) {
  s.intermediate = padded(s.intermediate);
  return plan_w4_workspace(s, max_tokens);
}
/// Blocks of 128 in a row of the intermediate's scales: whole 16 bytes.
constexpr int scale_blocks(int padded_columns) { return (padded_columns / kDepth + 3) / 4 * 4; }

constexpr W4Tuning choose_tuning(LocalShape const& shape, int max_tokens, int most_rows) {
  W4Tuning t{};
  std::int64_t const rows = std::int64_t{max_tokens} * shape.topk / (shape.num_experts > 0 ? shape.num_experts : 1);
  t.tile_rows = rows <= 9 ? 16 : most_rows;
  return t;
}

struct Params;
/// Enqueues the layer kernel on this number of multiprocessors.
using Launcher = void (*)(Params const& params, int workers, CUstream_st* stream);
/// The launcher of W4Activation, or of any activation. Defined in experts/hopper/w4/a8/kernel.cuh, from which a program instantiates or
/// links them (moe_add_hopper_kernels).
template <W4Scheme S, bool Any>
void launch_layer(Params const& params, int workers, CUstream_st* stream);

}  // namespace moe::hopper::w4a8
