// SPDX-License-Identifier: Apache-2.0
// tests/expert_factor.hpp: what expert p multiplies a row by, in tests and benchmarks of exchanges.
#pragma once

#include "moe/core/types.hpp"

namespace moe_test {

MOE_HD inline float factor(int p) { return 1.0F + 0.25F * static_cast<float>(p % 16); }

}  // namespace moe_test
