// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/reduced_once.cpp: experts and backend both reduce.
// expect: the weighted sum over the top-k would be done twice or never
// prints: Value<moe::TopKReduction::backend>
// prints: Value<moe::TopKReduction::experts>
#include "../archetypes.hpp"

#ifdef MOE_FIXED
inline constexpr auto kReduction = moe::TopKReduction::experts;
#else
inline constexpr auto kReduction = moe::TopKReduction::backend;
#endif
using Backend = moe_test::ArchetypeBackend<moe::ActivationFormat::standard, kReduction>;
using Layer = moe::ModularKernel<moe_test::Tiny, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, Backend,
                                 moe_test::ArchetypeExperts<>>;

static_assert(sizeof(Layer) > 0);
