// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/quantization_fp8_group.cpp: fp8 groups of 64.
// expect: moe: fp8 groups are of 128 elements. Fix: choose fp8_group128
// prints: Value<64>
// prints: Value<128>
#include "moe/quantization/fp8_group128.hpp"

#ifdef MOE_FIXED
using Quantization = moe::quantization::Fp8Group<128>;
#else
using Quantization = moe::quantization::Fp8Group<64>;
#endif

static_assert(Quantization::kWeightGroupRows > 0);
