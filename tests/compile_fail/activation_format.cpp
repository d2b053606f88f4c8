// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/activation_format.cpp: batched backend, standard experts.
// expect: the backend delivers an activation format that the experts cannot read
// prints: Value<moe::ActivationFormat::batched>
// prints: ArchetypeExperts
#include "../archetypes.hpp"

#ifdef MOE_FIXED
using Backend = moe_test::ArchetypeBackend<moe::ActivationFormat::standard>;
#else
using Backend = moe_test::ArchetypeBackend<moe::ActivationFormat::batched>;
#endif
using Layer = moe::ModularKernel<moe_test::Tiny, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, Backend,
                                 moe_test::ArchetypeExperts<>>;

static_assert(sizeof(Layer) > 0);
