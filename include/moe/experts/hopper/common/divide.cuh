// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/divide.cuh: integer division without a division.
#pragma once

namespace moe::hopper::detail {

/// The quotient of non-negative integers below 2^21, from the reciprocal of the divisor.
__device__ inline int divide(int n, float reciprocal) { return __float2int_rz((static_cast<float>(n) + 0.5F) * reciprocal); }

}  // namespace moe::hopper::detail
