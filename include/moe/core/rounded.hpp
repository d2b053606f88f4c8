// SPDX-License-Identifier: Apache-2.0
// core/rounded.hpp: float32 operations that are rounded once, to nearest even, with the same bits on the host and on the device.
#pragma once

#include <cmath>

#include "moe/core/types.hpp"

namespace moe {

// On the device, the _rn intrinsics give these bits whatever fast-math flags the code is compiled with, and keep nvcc from contracting a
// product and a sum into one rounding. A host compiler may contract them, unless a flag forbids it.
MOE_HD inline float mul_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
MOE_HD inline float add_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
MOE_HD inline float sub_rn(float a, float b) { return add_rn(a, -b); }
MOE_HD inline float fma_rn(float a, float b, float c) {
#ifdef __CUDA_ARCH__
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}
MOE_HD inline float div_rn(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}
MOE_HD inline float sqrt_rn(float a) {
#ifdef __CUDA_ARCH__
  return __fsqrt_rn(a);
#else
  return std::sqrt(a);
#endif
}

}  // namespace moe
