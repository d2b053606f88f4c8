// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/placement_missing.cpp: parameters of a layer without a placement.
// expect: .placement is missing in the layer's parameters. Fix: .placement = moe::ExpertPlacement(num_experts, ranks)
// prints: Layer<
#include "../archetypes.hpp"

using namespace moe_test;

Compose<>::Params params() {
#ifdef MOE_FIXED
  return {.max_tokens_per_rank = 8, .placement = ExpertPlacement(4, 1)};
#else
  return {.max_tokens_per_rank = 8};
#endif
}
