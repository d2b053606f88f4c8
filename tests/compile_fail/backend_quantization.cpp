// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/backend_quantization.cpp: a scheme that the backend does not list.
// expect: the backend cannot carry this quantisation's payload
// prints: ArchetypeBackend | Backend
// prints: ArchetypeQuantization
#include "../archetypes.hpp"

#ifdef MOE_FIXED
inline constexpr bool kCarries = true;
#else
inline constexpr bool kCarries = false;
#endif
using Backend = moe_test::ArchetypeBackend<moe::ActivationFormat::standard, moe::TopKReduction::experts, kCarries>;
using Layer = moe::ModularKernel<moe_test::Tiny, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, Backend,
                                 moe_test::ArchetypeExperts<>>;

static_assert(sizeof(Layer) > 0);
