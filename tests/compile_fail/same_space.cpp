// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/same_space.cpp: host backend, device experts.
// expect: backend and experts live in different memory spaces
// prints: space::host
// prints: space::cuda
#include "../archetypes.hpp"

#ifdef MOE_FIXED
using Experts = moe_test::ArchetypeExperts<>;
#else
struct OnDevice : moe_test::ExpertsFacts {
  static constexpr bool kOnDevice = true;
};
using Experts = moe_test::ArchetypeExperts<OnDevice>;
#endif
using Layer = moe::ModularKernel<moe_test::Tiny, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>,
                                 moe_test::ArchetypeBackend<>, Experts>;

static_assert(sizeof(Layer) > 0);
