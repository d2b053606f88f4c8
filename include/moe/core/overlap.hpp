// SPDX-License-Identifier: Apache-2.0
// core/overlap.hpp: whether two arrays have a byte in common, and the error of an output that does. It includes nothing of the library.
#pragma once

#include <cstdint>
#include <string>

namespace moe::detail {

/// Bytes of an array: row i is [begin + i * stride, begin + i * stride + width). Rows ascend and do not overlap each other.
struct ByteRows {
  std::uintptr_t begin = 0;
  std::int64_t rows = 0;
  std::int64_t stride = 0;
  std::int64_t width = 0;

  std::uintptr_t first(std::int64_t row) const { return begin + static_cast<std::uintptr_t>(row) * static_cast<std::uintptr_t>(stride); }
  std::uintptr_t last(std::int64_t row) const { return first(row) + static_cast<std::uintptr_t>(width); }
  bool empty() const { return rows <= 0 || width <= 0; }
};

/// Exact: columns of one matrix beside each other have no byte in common. Walks the rows only where the ranges from first to last overlap.
inline bool overlap(ByteRows const& a, ByteRows const& b) {
  if (a.empty() || b.empty()) return false;
  if (a.last(a.rows - 1) <= b.begin || b.last(b.rows - 1) <= a.begin) return false;
  for (std::int64_t i = 0, j = 0; i < a.rows && j < b.rows;) {
    if (a.last(i) <= b.first(j)) {
      ++i;
    } else if (b.last(j) <= a.first(i)) {
      ++j;
    } else {
      return true;
    }
  }
  return false;
}

/// The error's text for an output over the array of that name.
inline std::string overlap_text(char const* what) {
  return std::string("output: its memory overlaps that of ") + what + ", expected memory that the call does not read";
}

}  // namespace moe::detail
