// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/experts_quantization.cpp: kQuantization = false.
// expect: the experts kernel has no path for this quantisation
// prints: ArchetypeExperts
// prints: ArchetypeQuantization
#include "../archetypes.hpp"

struct Facts : moe_test::ExpertsFacts {
#ifndef MOE_FIXED
  static constexpr bool kQuantization = false;
#endif
};
using Layer = moe::ModularKernel<moe_test::Tiny, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>,
                                 moe_test::ArchetypeBackend<>, moe_test::ArchetypeExperts<Facts>>;

static_assert(sizeof(Layer) > 0);
