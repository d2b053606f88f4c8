// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/experts_activation.cpp: kActivation = false.
// expect: the experts kernel has no path for this activation
// prints: ArchetypeExperts
// prints: activation::Fixed | Tiny::Activation
#include "../archetypes.hpp"

struct Facts : moe_test::ExpertsFacts {
#ifndef MOE_FIXED
  static constexpr bool kActivation = false;
#endif
};
using Layer = moe::ModularKernel<moe_test::Tiny, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>,
                                 moe_test::ArchetypeBackend<>, moe_test::ArchetypeExperts<Facts>>;

static_assert(sizeof(Layer) > 0);
