// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/slots.cuh: where the data of a slot lies: slot j of token t has the number t · topk + j.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/common/divisor.hpp"

namespace moe::hopper {

/// The id or weight of a slot, in rows of k elements with `gap` elements between them.
template <class T>
__device__ inline T slot_value(T const* values, int slot, int topk, int gap) {
  return values[gap == 0 ? slot : slot + static_cast<long long>(slot / topk) * gap];
}

/// Where the ids of a token's slots are: rows of k elements with `gap` elements between them.
struct SlotIds {
  std::int32_t const* ids;
  int gap;
  __host__ __device__ SlotIds(std::int32_t const* ids_, int gap_ = 0) : ids(ids_), gap(gap_) {}
  __device__ std::int32_t const* row(long long token, int topk) const { return ids + token * (topk + gap); }
};

/// The row of x that a slot reads: `gather`'s, or its token's. `per_token` divides by topk.
__device__ inline long long input_row(std::int32_t const* gather, int slot, Divisor per_token) {
  return gather != nullptr ? gather[slot] : per_token.quotient(slot);
}

}  // namespace moe::hopper
