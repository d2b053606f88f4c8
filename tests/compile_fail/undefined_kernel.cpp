// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/undefined_kernel.cpp: experts of a user whose kernel is declared only.
// expect: the experts' kernel is declared and not defined. Fix: include the header that defines it before the layer is named
// prints: Experts::Kernel<
#include "../archetypes.hpp"

struct Experts : moe_test::ArchetypeExperts<> {
#ifndef MOE_FIXED
  template <class Config, class Quant, moe::ActivationFormat Format>
  class Kernel;
#endif
};

using moe_test::ArchetypeBackend, moe_test::ArchetypeQuantization, moe_test::ArchetypeRouter;
static_assert(sizeof(moe_test::Compose<ArchetypeRouter<>, ArchetypeQuantization<>, ArchetypeBackend<>, Experts>) > 0);
