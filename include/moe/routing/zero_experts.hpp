// SPDX-License-Identifier: Apache-2.0
// routing/zero_experts.hpp: what zero-computation experts add to the output, and their removal from the slots before dispatch.
#pragma once

#include <cstdint>

#include "moe/core/array.hpp"
#include "moe/core/types.hpp"
#include "moe/routing/router_config.hpp"
#include "moe/routing/score.hpp"

namespace moe::routing {

/// Turns the zero experts (ids >= num_experts) of one row's k slots into id -1 with weight 0. Returns the sum of their weights, the factor
/// of the token in the output; 0 for kind none.
MOE_HD inline float take_zero_experts(int num_experts, ZeroExpertKind kind, int k, std::int32_t* ids, float* weights) {
  float const factor = detail::row_sum(
      detail::kWarp, [&](int j) { return j < k && ids[j] >= num_experts && kind == ZeroExpertKind::identity ? weights[j] : 0.0F; });
  for (int j = 0; j < k; ++j) {
    if (ids[j] < num_experts) continue;
    ids[j] = kNoExpert;
    weights[j] = 0.0F;
  }
  return factor;
}

/// contribution[t] = sum over the zero experts of row t of w x_t, float32 [M, H]; their slots become id -1, weight 0. The caller adds the
/// contribution on the source rank, once, after the final reduction. ids, weights: [M, k or more], their first k columns are routed.
template <class X>
void apply_zero_experts(int num_experts, ZeroExpertKind kind, int k, Rows<X const> hidden, Rows<std::int32_t> ids, Rows<float> weights,
                        Rows<float> contribution) {
  std::int64_t const rows = ids.extent(0);
  std::int64_t const width = hidden.extent(1);
#ifdef _OPENMP
#pragma omp parallel for schedule(static) if (rows * width >= 1 << 16)
#endif
  for (std::int64_t t = 0; t < rows; ++t) {
    float const factor = take_zero_experts(num_experts, kind, k, row_ptr(ids, t), row_ptr(weights, t));
    X const* const x = row_ptr(hidden, t);
    float* const out = row_ptr(contribution, t);
    for (std::int64_t h = 0; h < width; ++h) out[h] = factor == 0.0F ? 0.0F : factor * to_float(x[h]);  // 0 x NaN adds nothing
  }
}

}  // namespace moe::routing
