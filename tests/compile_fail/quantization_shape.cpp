// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/quantization_shape.cpp: a group of 64 over 32 columns.
// expect: hidden or intermediate is not a multiple of the quantisation's group
// prints: ArchetypeQuantization | Quantization
// prints: Value<64>
// prints: MultipleOf<64>
// prints: Value<32>
// prints: MultipleOf<64>
#include "../archetypes.hpp"

#ifdef MOE_FIXED
using Quantization = moe_test::ArchetypeQuantization<32>;
#else
using Quantization = moe_test::ArchetypeQuantization<64>;  // intermediate is 32
#endif
using Layer = moe::ModularKernel<moe_test::Tiny, moe_test::ArchetypeRouter<>, Quantization, moe_test::ArchetypeBackend<>,
                                 moe_test::ArchetypeExperts<>>;

static_assert(sizeof(Layer) > 0);
