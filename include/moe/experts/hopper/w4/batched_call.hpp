// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/batched_call.hpp: the arguments of a call of packed weights in the batched format. Plain host C++.
#pragma once

#include <cstdint>

namespace moe::hopper {

/// One call in the batched format; device memory. No router weights.
struct BatchedCall {
  void const* x = nullptr;               ///< [E, capacity, H]
  float const* x_scales = nullptr;       ///< [E, capacity, scales of a row] of rows with scales
  std::int32_t const* counts = nullptr;  ///< [E] valid rows of each expert
  int capacity = 0;
  int expected_rows = 16;                ///< of an expert, a hint for the tile
  void* out = nullptr;                   ///< [E, capacity, H]
  std::int32_t const* gather = nullptr;  ///< [E, capacity]: row i of expert e is row gather[e][i] of x, which then has any number of rows
};

}  // namespace moe::hopper
