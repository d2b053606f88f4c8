// SPDX-License-Identifier: Apache-2.0
// runner/device/product_choices.hpp: how the products of a block are computed on the device where there is more than one way: all sizes at
// which a choice changes, in one table. Plain host C++.
#pragma once

#include <cstdint>

#include "moe/runner/primitives.hpp"

namespace moe::runner::device {

/// Each value is from a measurement (docs/log/runner.md). bench/runner_products_bench prints the way that follows from these values beside
/// the fastest one, for each size.
struct ProductChoices {
  /// Shared experts of at most this many rows run on a side stream beside the routed ones, unless the caller says otherwise. What they then
  /// cost: bench/runner_overlap_bench.
  std::int64_t shared_beside_rows = 256;
  /// Whether shared experts that a checkpoint stores in the scheme of its experts are computed in it (shared::Stored) rather than dense,
  /// unless the caller says otherwise. It is decided once for all numbers of rows, where the weights are read. On an H200, hidden 7168 and
  /// one expert of 2048, for 1, 128 and 4096 rows: dense 31, 34 and 523 us, in e4m3 blocks 48, 93 and 535 ("Ways to compute
  /// the products of a block").
  bool shared_in_scheme = false;
  /// A product with float32 outputs whose sums may depend on the number of rows runs in the library's kernel (small_product) up to this
  /// many rows and outputs, although cuBLASLt could run it. On an H200, hidden 7168 and 256 outputs: 4.8 to 5.9 us for 1 to 32 rows,
  /// cuBLASLt 7.1 to 7.5; from 64 rows on cuBLASLt is faster ("Gates").
  std::int64_t small_product_rows = 32;
  std::int64_t small_product_outputs = 512;
};
inline constexpr ProductChoices kProductChoices{};

/// Whether a product [rows, K] · [n, K]ᵀ that cuBLASLt could run runs in the library's kernel.
constexpr bool prefers_small_product(Sums sums, bool float32_outputs, std::int64_t rows, std::int64_t n) {
  return float32_outputs && sums == Sums::blocked && rows <= kProductChoices.small_product_rows &&
         n <= kProductChoices.small_product_outputs;
}

}  // namespace moe::runner::device
