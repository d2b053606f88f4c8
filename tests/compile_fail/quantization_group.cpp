// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/quantization_group.cpp: a group of 48.
// expect: moe: a weight-only group is 16, 32, 64, 128 or 256 elements or the whole row
// prints: Value<48>
// prints: OneOf<0, 16, 32, 64, 128, 256>
#include "moe/quantization/int4_group128.hpp"

#ifdef MOE_FIXED
using Quantization = moe::quantization::WNa16<4, 64>;
#else
using Quantization = moe::quantization::WNa16<4, 48>;
#endif

static_assert(Quantization::kWeightGroupRows == 1);
