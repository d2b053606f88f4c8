// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/rounded_sums.hpp: where the sums of a thread of a warpgroup lie in a brick's product of 64 weight rows by N rows of x.
// A thread has N / 4 sums of its weight row r, and as many of r + 8. Plain C++, for host and device.
#pragma once

#include "moe/core/types.hpp"

namespace moe::hopper::w4 {

/// The row of x of sum i of either weight row.
MOE_HD constexpr int row_of_sum(int thread, int i) { return 8 * (i / 2) + 2 * (thread & 3) + i % 2; }
/// The same sum among all N / 2 of a thread; half 1: of weight row r + 8.
MOE_HD constexpr int position_of_sum(int half, int i) { return 4 * (i / 2) + 2 * half + i % 2; }
/// The first feature of a thread, counted from the brick's: with a gate r is its gate and r + 8 its up row, without they are two features,
/// the second eight further.
MOE_HD constexpr int feature_of_thread(int thread, bool gated) { return (gated ? 8 : 16) * (thread >> 5) + ((thread & 31) >> 2); }

}  // namespace moe::hopper::w4
