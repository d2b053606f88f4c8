// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/experts_element.cpp: kElement = false.
// expect: the experts kernel has no path for this element type of activations and weights
// prints: ArchetypeExperts
// prints: float | LayerDefaults::Act
// prints: float | LayerDefaults::Weight
#include "../archetypes.hpp"

struct Facts : moe_test::ExpertsFacts {
#ifndef MOE_FIXED
  static constexpr bool kElement = false;
#endif
};
using Layer = moe::ModularKernel<moe_test::Tiny, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>,
                                 moe_test::ArchetypeBackend<>, moe_test::ArchetypeExperts<Facts>>;

static_assert(sizeof(Layer) > 0);
