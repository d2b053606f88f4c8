// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/a8/problem.hpp: the stored form of mxfp4 weights for products in e4m3, sizes and refusals. Plain host C++.
//
// A brick is 64 weight rows by 128 of K: 4096 bytes of codes (thread t reads 16 bytes at 16 t: steps 0 and 1 of 32, rows r and r + 8, and
// 16 bytes at 2048 + 16 t: steps 2 and 3), then a word of scales per row (FoldedScales), then 16 bytes of which the first word is the kind
// of the brick (kNormalBrick …). Rows are ordered, and bricks lie side by side, as in experts/hopper/w4/problem.hpp.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/w4/problem.hpp"

namespace moe::hopper::w4a8 {

inline constexpr int kDepth = 128;  ///< of K of a brick; activations and the intermediate have one scale for as many
inline constexpr int kCodeBytes = 4096;
inline constexpr int kScaleBytes = 256;
inline constexpr int kBrickBytes = kCodeBytes + kScaleBytes + 16;
inline constexpr int kMostRows = 80;     ///< of a tile: sums take half as many registers again
inline constexpr int kMostAnyRows = 64;  ///< of a tile of any activation: its formulas together are a lot of code

constexpr int padded(int columns) { return (columns + kDepth - 1) / kDepth * kDepth; }

/// Packed bytes of one matrix of `rows` (2I or H) by `cols`, multiples of 64 and 128.
MOE_HD constexpr std::int64_t packed_bytes(std::int64_t rows, std::int64_t cols) {
  return rows / kBrickRows * (cols / kDepth) * kBrickBytes;
}

/// E_CONFIG unless the kernels can run these sizes; E_ARG for null or misaligned weights.
inline void check(LocalShape const& s, W4Scheme scheme, W4Weights const& w) {
  if (scheme != W4Scheme::mxfp4) {
    throw Error(ErrorCode::config, text("hopper_w4a8: weights in ", name(scheme), " under rows of e4m3 have no kernels, mxfp4 has"));
  }
  w4::check_sizes("hopper_w4a8", s, W4Scheme::mxfp4, kBrickRows, 32);
  w4::check_stored("hopper_w4a8", w);
}

/// The workspace of W4A16Layer for rows of whole groups: its 16-bit intermediate has room for the e4m3 codes and their scales.
constexpr W4Workspace plan_workspace(LocalShape s, int max_tokens) {
  s.intermediate = padded(s.intermediate);
  return plan_w4_workspace(s, max_tokens);
}
/// Blocks of 128 in a row of the intermediate's scales: whole 16 bytes.
constexpr int scale_blocks(int padded_columns) { return (padded_columns / kDepth + 3) / 4 * 4; }

constexpr W4Tuning choose_tuning(LocalShape const& shape, int max_tokens, int most_rows = kMostRows) {
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
template <bool Any>
void launch_layer(Params const& params, int workers, CUstream_st* stream);

}  // namespace moe::hopper::w4a8
