// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/combine_overlaps.cpp: a layer that asks for experts and combine in one schedule, over an exchange that experts cannot
// tell what is complete.
// expect: the configuration asks for experts and combine in one schedule, which this exchange or these experts cannot run
// prints: Exchange
// prints: Kernel
#include "../archetypes.hpp"

struct Config : moe_test::Tiny {
#ifndef MOE_FIXED
  static constexpr bool overlap_combine = true;
#endif
};
using Layer = moe::ModularKernel<Config, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, moe_test::ArchetypeBackend<>,
                                 moe_test::ArchetypeExperts<>>;

static_assert(sizeof(Layer) > 0);
