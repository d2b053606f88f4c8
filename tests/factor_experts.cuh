// SPDX-License-Identifier: Apache-2.0
// tests/factor_experts.cuh: experts on the device with a simple result: each multiplies a row by its factor.
#pragma once

#include <cmath>
#include <cstdint>

#include "moe/core/array.hpp"
#include "moe/core/tokens.hpp"
#include "moe/quantization/rows/quantize_row.cuh"
#include "tests/expert_factor.hpp"

namespace moe_test {

/// One warp per row: y[r] = row r times the sum of its experts' weighted factors.
template <class Act, class Quant, class Tokens, class Partial>
__global__ void factor_experts(Quant const quant, Tokens const tokens, std::int32_t const* physical, int num_local, int hidden,
                               Partial* y) {
  extern __shared__ float row[];
  int const lane = static_cast<int>(threadIdx.x);
  auto const r = static_cast<std::int64_t>(blockIdx.x);
  float sum = 0.0F;
  for (int j = 0; j < static_cast<int>(tokens.topk_ids.extent(1)); ++j) {
    std::int32_t const id = tokens.topk_ids(r, j);
    float const f = id >= 0 && id < num_local ? factor(physical[id]) : 0.0F;
    sum += id == moe::kNoExpert ? 0.0F : id < num_local ? tokens.topk_weights(r, j) * f : NAN;
  }
  moe::quantization::dequantize_row_warp<Quant, Act>(quant, moe::row_ptr(tokens.rows, r), moe::row_ptr(tokens.scales, r), hidden, row,
                                                     lane);
  __syncwarp();
  for (int h = lane; h < hidden; h += 32) {
    y[r * hidden + h] = moe::from_float<Partial>(sum * row[h]);
  }
}

}  // namespace moe_test
