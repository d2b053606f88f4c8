// SPDX-License-Identifier: Apache-2.0
// core/ptx/approximate.cuh: approximations of the special-function unit.
#pragma once

#include <cuda_runtime.h>

namespace moe::ptx {

/// About 1 / x, to one unit in the last place; subnormal numbers count as 0.
__device__ inline float approximate_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// About 2^x, relative error 2^-22; a subnormal operand or result counts as 0.
__device__ inline float approximate_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace moe::ptx
