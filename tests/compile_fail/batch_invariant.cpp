// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/batch_invariant.cpp: a layer that must be batch-invariant over experts that do not say they are.
// expect: the layer must be batch-invariant, and the experts kernel sums in an order that depends on the number of rows
// prints: ArchetypeExperts
#include "../archetypes.hpp"

struct Config : moe_test::Tiny {
  static constexpr bool batch_invariant = true;
};
struct Facts : moe_test::ExpertsFacts {
#ifdef MOE_FIXED
  static constexpr bool kBatchInvariant = true;
#endif
};
using Layer = moe::ModularKernel<Config, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, moe_test::ArchetypeBackend<>,
                                 moe_test::ArchetypeExperts<Facts>>;

static_assert(sizeof(Layer) > 0);
