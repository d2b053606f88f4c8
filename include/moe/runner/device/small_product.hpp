// SPDX-License-Identifier: Apache-2.0
// runner/device/small_product.hpp: how the kernel for products with few outputs (router gates) cuts its work. Plain host C++.
#pragma once

#include <cstdint>
#include <ostream>

namespace moe::runner::device {

/// The cut of y [M, N] = x [M, K] · wᵀ into thread blocks of 8 warps. A block computes 16 · row_tiles rows of 8 · col_tiles columns over
/// its part of K; the blocks of a cluster have the same rows and columns and add their parts in rank order.
struct SmallProductPlan {
  int row_tiles = 1;  ///< 1, 2, 4 or 8: warps along M; the others of the 8 warps cut the block's part of K
  int col_tiles = 2;  ///< 1 with one row tile; 2; 4 with 8 row tiles
  int cluster = 1;    ///< blocks along K: 1, 2, 4 or 8
  friend bool operator==(SmallProductPlan const&, SmallProductPlan const&) = default;
  friend std::ostream& operator<<(std::ostream& out, SmallProductPlan const& p) {
    return out << "SmallProductPlan{row_tiles " << p.row_tiles << ", col_tiles " << p.col_tiles << ", cluster " << p.cluster << "}";
  }
};

inline constexpr int kSmallProductWarps = 8;
inline constexpr int kSmallProductDepth = 32;  ///< columns of x that a warp takes at a time

/// Thread blocks of a product.
constexpr std::int64_t thread_blocks(SmallProductPlan const& p, std::int64_t rows, std::int64_t n) {
  std::int64_t const height = 16 * p.row_tiles;
  std::int64_t const width = 8 * p.col_tiles;
  return (rows + height - 1) / height * ((n + width - 1) / width) * p.cluster;
}

/// A cluster is as long as K allows and depends on K alone: so does the order of a sum, whatever the number of rows. As few row tiles as
/// hold the rows, so that few blocks read few rows; and columns as wide as leaves no multiprocessor idle, so that few blocks read x.
constexpr SmallProductPlan choose_small_product(std::int64_t rows, std::int64_t n, std::int64_t k) {
  constexpr std::int64_t kBusy = 128;  // blocks; an H100 or H200 has 132 multiprocessors
  SmallProductPlan p;
  std::int64_t const steps = (k + kSmallProductDepth - 1) / kSmallProductDepth;
  while (p.cluster < 8 && 2 * p.cluster * kSmallProductWarps <= steps) p.cluster *= 2;
  while (p.row_tiles < 8 && 16 * p.row_tiles < rows) p.row_tiles *= 2;
  if (p.row_tiles == 1 && thread_blocks(p, rows, n) < kBusy) p.col_tiles = 1;
  if (p.row_tiles == 8 && thread_blocks(p, rows, n) >= 2 * kBusy) p.col_tiles = 4;
  return p;
}

}  // namespace moe::runner::device
