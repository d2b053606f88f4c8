// SPDX-License-Identifier: Apache-2.0
// c/overlap.hpp: whether two arrays of moe.h have a byte in common. Of moe.h alone, so that other interfaces over it can ask the same.
#pragma once

#include <cstdint>

#include "moe/core/overlap.hpp"
#include "moe/moe.h"

namespace moe::c {

using moe::detail::ByteRows;
using moe::detail::overlap;
using moe::detail::overlap_text;

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

}  // namespace moe::c
