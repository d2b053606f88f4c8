// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/quantization_int8_group.cpp: int8 groups of 64.
// expect: moe: int8 groups are of 128 elements. Fix: choose int8_group128
// prints: Value<64>
// prints: Value<128>
#include "moe/quantization/int8_group128.hpp"

#ifdef MOE_FIXED
using Quantization = moe::quantization::Int8Group<128>;
#else
using Quantization = moe::quantization::Int8Group<64>;
#endif

static_assert(Quantization::kWeightGroupRows > 0);
