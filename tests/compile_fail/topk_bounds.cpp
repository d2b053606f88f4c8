// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/topk_bounds.cpp: more experts per token than experts.
// expect: topk must be at least 1, at most num_experts and at most 32
// prints: Value<5>
// prints: Value<4>
// prints: Value<32>
#include "../archetypes.hpp"

struct Config : moe_test::Tiny {
#ifndef MOE_FIXED
  static constexpr int topk = 5;  // of 4 experts
#endif
};
using Layer = moe::ModularKernel<Config, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, moe_test::ArchetypeBackend<>,
                                 moe_test::ArchetypeExperts<>>;

static_assert(sizeof(Layer) > 0);
