// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/dispatch_overlaps.cpp: a layer that asks for dispatch and experts in one schedule, over an exchange that has no counts
// of arriving rows.
// expect: the configuration asks for dispatch and experts in one schedule, which this exchange or these experts cannot run
// prints: Exchange
// prints: Kernel
#include "../archetypes.hpp"

struct Config : moe_test::Tiny {
#ifndef MOE_FIXED
  static constexpr bool overlap_dispatch = true;
#endif
};
using Layer = moe::ModularKernel<Config, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, moe_test::ArchetypeBackend<>,
                                 moe_test::ArchetypeExperts<>>;

static_assert(sizeof(Layer) > 0);
