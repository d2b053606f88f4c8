// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/monolithic_router.cpp: a router whose choice experts that route inside cannot make.
// expect: the experts route inside, and have no path for this router
// prints: ArchetypeExperts
// prints: ArchetypeRouter
#include "../archetypes.hpp"

struct Facts : moe_test::ExpertsFacts {
  static constexpr bool kRoutesInside = true;
#ifndef MOE_FIXED
  static constexpr bool kRouter = false;
#endif
};
using Layer = moe_test::Compose<moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, moe_test::ArchetypeBackend<>,
                                moe_test::ArchetypeExperts<Facts>>;

static_assert(sizeof(Layer) > 0);
