// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/column_order.hpp: the order of the units behind GEMM1 if GEMM2 runs block of columns by block of columns. Plain
// C++, for the kernels that draw units and for the host that tests them.
#pragma once

#include <algorithm>

#include "moe/core/types.hpp"

namespace moe::hopper {

inline constexpr int kMostColumnBlocks = 8;
inline constexpr int kColumnStep = 256;  ///< columns of a block are a multiple of this, the columns of a unit of GEMM2

/// `hidden` columns in blocks of `columns`; the last may have fewer.
struct ColumnCut {
  int blocks;
  int columns;
  friend constexpr bool operator==(ColumnCut const&, ColumnCut const&) = default;
};

/// At most `wanted` blocks of as few columns as that allows.
constexpr ColumnCut cut_columns(int hidden, int wanted) {
  int const tiles = (hidden + kColumnStep - 1) / kColumnStep;
  int const columns = (tiles + wanted - 1) / wanted * kColumnStep;
  return {(hidden + columns - 1) / columns, columns};
}
/// Whether blocks of this many columns make up the hidden size.
constexpr bool covers(ColumnCut const& cut, int hidden) {
  return cut.blocks >= 1 && cut.blocks <= kMostColumnBlocks && cut.columns >= kColumnStep && cut.columns % kColumnStep == 0 &&
         (hidden + cut.columns - 1) / cut.columns == cut.blocks;
}

/// Tokens that one thread block sums at a time: some 16 K sums, so that a block of columns has several units for each multiprocessor at
/// many tokens, and the last units are short.
constexpr int tokens_of_sums(int columns) { return std::clamp(16384 / columns, 8, 64); }

/// Units behind GEMM1. G: GEMM2's units of a block of columns, S: its sums over the slots, blocks 0 to B - 1:
///   G0 G1 S0 G2 S1 … G(B-1) S(B-2) S(B-1)
/// The sums of a block wait for all its units of GEMM2. Those stand before them in the list, most of them by a whole block.
struct ColumnUnits {
  int blocks;         ///< B
  int products;       ///< units of GEMM2 in each block but the last
  int last_products;  ///< in the last
  int sums;           ///< units of sums in each block
};

/// Where a unit belongs. Phase 1: GEMM2, 2: sums, -1: behind the last.
struct ColumnPlace {
  int phase;
  int block;
  int local;  ///< number within the block's units of that phase
  friend constexpr bool operator==(ColumnPlace const&, ColumnPlace const&) = default;
};

/// Unit `number`, counted from the end of GEMM1.
MOE_HD constexpr ColumnPlace column_place(ColumnUnits const& u, int number) {
  int const begin = u.blocks == 1 ? u.last_products : u.products;
  if (number < begin) return {1, 0, number};
  number -= begin;
  int const step = u.products + u.sums;  // G(b + 1) and Sb
  int const whole = u.blocks > 2 ? u.blocks - 2 : 0;
  int const block = number < whole * step ? number / step : whole;
  number -= block * step;
  int const products = block < whole ? u.products : u.blocks > 1 ? u.last_products : 0;
  if (number < products) return {1, block + 1, number};
  number -= products;
  if (number < u.sums) return {2, block, number};
  number -= u.sums;
  if (u.blocks > 1 && number < u.sums) return {2, block + 1, number};
  return {-1, 0, 0};
}

/// The number of the first unit behind S0.
MOE_HD constexpr int behind_first_sums(ColumnUnits const& u) {
  if (u.blocks == 1) return u.last_products + u.sums;
  return u.products + (u.blocks == 2 ? u.last_products : u.products) + u.sums;
}

}  // namespace moe::hopper
