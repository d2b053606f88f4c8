// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/matrix_layout.hpp: how the rows of w13 and w2 lie in memory. Plain host C++.
#pragma once

#include "moe/experts/hopper/common/problem.hpp"

namespace moe::hopper {

/// Where a weight matrix lies in its tensor map and in the arrays with one value per feature (biases, scales of rows). Index 0 of a pair
/// is the first weight box of a unit (gate rows), 1 the second (up rows, or the 128 features after the first box's).
struct MatrixLayout {
  int depth;          ///< map slices per expert
  int dx, dy, dz;     ///< offset of the second box in the map from the first: column, row, slice
  int rows;           ///< of one expert
  int row_step;       ///< from a feature's row to the next feature's
  int half_step;      ///< from a feature's row in the first box to its row in the second
  int half_features;  ///< features from the first box to the second: 0 for gate and up, else 128
  int limit;          ///< features
};

/// How the rows of w13 follow each other.
enum class GateUp : std::uint8_t {
  ungated,      ///< I rows
  halves,       ///< I gate rows, then I up rows
  interleaved,  ///< gate 0, up 0, gate 1, up 1, …
};

constexpr MatrixLayout w13_layout(LocalShape const& s, GateUp order) {
  switch (order) {
    case GateUp::ungated: return {1, 0, 128, 0, s.intermediate, 1, 128, 128, s.intermediate};
    case GateUp::halves: return {2, 0, 0, 1, 2 * s.intermediate, 1, s.intermediate, 0, s.intermediate};
    case GateUp::interleaved: return {1, s.hidden, 0, 0, 2 * s.intermediate, 2, 1, 0, s.intermediate};
  }
  return {};
}
constexpr MatrixLayout w2_layout(LocalShape const& s) { return {1, 0, 128, 0, s.hidden, 1, 128, 128, s.hidden}; }

}  // namespace moe::hopper
