// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/shared_memory.cpp: kSharedMemory = 228 * 1024.
// expect: the experts kernel's tile needs more shared memory than a thread block can have
// prints: Value<233472>
// prints: Value<232448>
#include "../archetypes.hpp"

struct Facts : moe_test::ExpertsFacts {
#ifndef MOE_FIXED
  static constexpr int kSharedMemory = 228 * 1024;
#endif
};
using Layer = moe::ModularKernel<moe_test::Tiny, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>,
                                 moe_test::ArchetypeBackend<>, moe_test::ArchetypeExperts<Facts>>;

static_assert(sizeof(Layer) > 0);
