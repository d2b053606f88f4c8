// SPDX-License-Identifier: Apache-2.0
// c/overlap.hpp: whether two arrays have a byte in common. Of moe.h alone, so that other interfaces over it can ask the same.
#pragma once

#include <cstdint>
#include <string>

#include "moe/moe.h"

namespace moe::c {

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
inline ByteRows bytes_of(void const* data, std::int64_t bytes) { return {reinterpret_cast<std::uintptr_t>(data), 1, 0, bytes}; }
/// A matrix whose rows may lie apart, or a contiguous array of any shape.
inline ByteRows bytes_of(DLTensor const& t) {
  std::uintptr_t const begin = reinterpret_cast<std::uintptr_t>(t.data) + t.byte_offset;
  std::int64_t const element = std::int64_t{t.dtype.bits} * t.dtype.lanes / 8;
  if (t.ndim == 2 && t.strides != nullptr && t.shape[0] > 1) return {begin, t.shape[0], t.strides[0] * element, t.shape[1] * element};
  std::int64_t count = 1;
  for (int i = 0; i < t.ndim; ++i) count *= t.shape[i];
  return {begin, 1, 0, count * element};
}

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

}  // namespace moe::c
