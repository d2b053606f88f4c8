// SPDX-License-Identifier: Apache-2.0
// routing/zero_experts.hpp: what zero-computation experts add to the output, and their removal from the slots before dispatch.
#pragma once

#include <cstdint>

#include "moe/core/array.hpp"
#include "moe/core/host_pool.hpp"
#include "moe/core/types.hpp"
#include "moe/routing/row/router_config.hpp"
#include "moe/routing/row/score.hpp"

namespace moe::routing {

/// Whether an id that a router gave is that of a zero expert.
MOE_HD constexpr bool is_zero_expert(std::int32_t id, int num_experts) { return id >= num_experts; }

/// The factor of a token itself in its output: the sum of the weights of the zero experts among one row's k slots; 0 for kind none.
/// docs/semantics/routing.md §10.
MOE_HD inline float zero_expert_factor(int num_experts, ZeroExpertKind kind, int k, std::int32_t const* ids, float const* weights) {
  if (kind == ZeroExpertKind::none) return 0.0F;
  return detail::row_sum(detail::kWarp, [&](int j) { return j < k && is_zero_expert(ids[j], num_experts) ? weights[j] : 0.0F; });
}

/// Returns zero_expert_factor() of a row and replaces its zero experts by id -1 with weight 0.
MOE_HD inline float take_zero_experts(int num_experts, ZeroExpertKind kind, int k, std::int32_t* ids, float* weights) {
  float const factor = zero_expert_factor(num_experts, kind, k, ids, weights);
  for (int j = 0; j < k; ++j) {
    if (!is_zero_expert(ids[j], num_experts)) continue;
    ids[j] = kNoExpert;
    weights[j] = 0.0F;
  }
  return factor;
}

/// out[t] += factor of row t · x_t, float32 [M, H]: what the zero experts add. The caller does it on the source rank, once, after the final
/// reduction. ids, weights: [M, k or more], their first k columns are routed; they stay as they are.
template <class X>
void add_zero_experts(int num_experts, ZeroExpertKind kind, int k, Rows<X const> hidden, Rows<std::int32_t const> ids,
                      Rows<float const> weights, Rows<float> out) {
  std::int64_t const rows = ids.extent(0);
  std::int64_t const width = hidden.extent(1);
  HostPool::instance().for_each(rows, 4, rows * width >= 1 << 16 ? host_threads() : 1, [&](std::int64_t t, int) {
    float const factor = zero_expert_factor(num_experts, kind, k, row_ptr(ids, t), row_ptr(weights, t));
    if (factor == 0.0F) return;  // 0 x NaN adds nothing
    X const* const x = row_ptr(hidden, t);
    float* const to = row_ptr(out, t);
    for (std::int64_t h = 0; h < width; ++h) to[h] += factor * to_float(x[h]);
  });
}

}  // namespace moe::routing
