// SPDX-License-Identifier: Apache-2.0
// io/partition.hpp: the rows and columns of one expert that a tensor-parallel rank takes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace moe::io::detail {

/// Copies the rows and columns of this partition out of a whole [rows, cols] matrix.
template <class T>
void slice(std::vector<T> const& whole, std::int64_t cols, std::int64_t row0, std::int64_t rows, std::int64_t col0, std::int64_t width,
           T* out) {
  for (std::int64_t i = 0; i < rows; ++i) std::copy_n(whole.data() + (row0 + i) * cols + col0, width, out + i * width);
}
/// One expert's whole w13 [parts * full, h] and w2 [h, full] cut down to this partition of `part` of `full`.
template <class T>
void cut(std::vector<T> const& w13, std::vector<T> const& w2, std::int64_t h, std::int64_t full, std::int64_t part, std::int64_t first,
         bool gated, T* out13, T* out2) {
  slice(w13, h, first, part, 0, h, out13);
  if (gated) slice(w13, h, full + first, part, 0, h, out13 + part * h);
  slice(w2, full, 0, h, first, part, out2);
}

}  // namespace moe::io::detail
