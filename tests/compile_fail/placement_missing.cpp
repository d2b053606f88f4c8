// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/placement_missing.cpp: parameters of a layer without a placement.
// expect: .placement is missing in the layer's parameters. Fix: .placement = moe::ExpertPlacement(num_experts, ranks)
// prints: Layer<
#include "../archetypes.hpp"

using namespace moe_test;
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"  // g++ would name the same line and the field, as a second error

void construct(Compose<>::Comm& comm, Compose<>::Weights const& weights) {
#ifdef MOE_FIXED
  Compose<> const layer(comm, weights, {.max_tokens_per_rank = 8, .placement = ExpertPlacement(4, 1)});
#else
  Compose<> const layer(comm, weights, {.max_tokens_per_rank = 8});  // named
#endif
}
