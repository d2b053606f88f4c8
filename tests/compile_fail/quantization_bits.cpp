// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/quantization_bits.cpp: three-bit weights.
// expect: moe: only 4 and 8 bit. Fix: choose 4 or 8 bits for weight-only integers
// prints: Value<3>
// prints: OneOf<4, 8>
#include "moe/quantization/int4_group128.hpp"

#ifdef MOE_FIXED
using Quantization = moe::quantization::WNa16<4, 128>;
#else
using Quantization = moe::quantization::WNa16<3, 128>;
#endif

static_assert(Quantization::kWeightGroupRows == 1);
