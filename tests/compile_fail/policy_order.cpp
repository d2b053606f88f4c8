// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/policy_order.cpp: router and quantisation, then backend and experts, in each other's place.
// errors: each
// expect: a type stands where another policy belongs. Fix: the order is ModularKernel<Config, Router, Quantization, Backend, Experts>
// prints: Tiny
// prints: ArchetypeQuantization
// prints: ArchetypeRouter
// prints: ArchetypeBackend
// prints: ArchetypeExperts
// expect: a type stands where another policy belongs. Fix: the order is ModularKernel<Config, Router, Quantization, Backend, Experts>
// prints: Tiny
// prints: ArchetypeRouter
// prints: ArchetypeQuantization
// prints: ArchetypeExperts
// prints: ArchetypeBackend
#include "../archetypes.hpp"

using namespace moe_test;
#ifdef MOE_FIXED
#define SWAPPED(a, b) a, b
#else
#define SWAPPED(a, b) b, a
#endif

static_assert(sizeof(Compose<SWAPPED(ArchetypeRouter<>, ArchetypeQuantization<>)>) > 0);
static_assert(sizeof(ModularKernel<Tiny, ArchetypeRouter<>, ArchetypeQuantization<>, SWAPPED(ArchetypeBackend<>, ArchetypeExperts<>)>) > 0);
