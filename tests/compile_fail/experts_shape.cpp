// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/experts_shape.cpp: kTile = 48.
// expect: hidden or intermediate is not a multiple of the experts kernel's tile
// prints: ArchetypeExperts
// prints: Value<64>
// prints: MultipleOf<48>
// prints: Value<32>
// prints: MultipleOf<48>
#include "../archetypes.hpp"

struct Facts : moe_test::ExpertsFacts {
#ifndef MOE_FIXED
  static constexpr int kTile = 48;
#endif
};
using Layer = moe::ModularKernel<moe_test::Tiny, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>,
                                 moe_test::ArchetypeBackend<>, moe_test::ArchetypeExperts<Facts>>;

static_assert(sizeof(Layer) > 0);
