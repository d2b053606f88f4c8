// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/quantization_fp8_block.cpp: fp8 blocks of 64 x 64.
// expect: moe: fp8 blocks are of 128 x 128 elements. Fix: choose fp8_block128
// prints: Value<64>
// prints: Value<128>
#include "moe/quantization/fp8_block128.hpp"

#ifdef MOE_FIXED
using Quantization = moe::quantization::Fp8Block<128>;
#else
using Quantization = moe::quantization::Fp8Block<64>;
#endif

static_assert(Quantization::kWeightGroupRows > 0);
