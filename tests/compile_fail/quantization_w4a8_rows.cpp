// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/quantization_w4a8_rows.cpp: 4-bit weights under activations of 4 bits.
// expect: moe: W4A8 has e4m3 or int8 activations
// prints: Value<
// prints: OneOf<
#include "moe/quantization/w4a8.hpp"

#ifdef MOE_FIXED
using Quantization = moe::quantization::W4A8<moe::quantization::Int8Codec>;
#else
using Quantization = moe::quantization::W4A8<moe::quantization::Nvfp4Codec>;
#endif

static_assert(Quantization::kWeightGroupRows == 1);
