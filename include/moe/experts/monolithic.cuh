// SPDX-License-Identifier: Apache-2.0
// experts/monolithic.cuh: the kernel of experts that route inside: chosen experts to local ids. Includes the routing kernels.
#pragma once

#include "moe/core/cuda_space.hpp"
#include "moe/experts/monolithic.hpp"
#include "moe/routing/device/pass_logits.cuh"
#include "moe/routing/device/route.cuh"

namespace moe::fix {
[[gnu::used]] inline void include_moe_experts_monolithic_cuh() {}
}  // namespace moe::fix

namespace moe::experts::detail {

static __global__ void localize_kernel(ChosenRows const rows) {
  std::int64_t const at = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  std::int64_t const k = rows.topk_ids.extent(1);
  if (at < rows.topk_ids.extent(0) * k) localize(rows, at / k, at % k);
}

[[gnu::used]] inline void localize(ChosenRows const& rows, Stream<space::cuda> stream) {
  constexpr int kThreads = 256;
  std::int64_t const slots = rows.topk_ids.extent(0) * rows.topk_ids.extent(1);
  if (slots == 0) return;
  localize_kernel<<<static_cast<unsigned>((slots + kThreads - 1) / kThreads), kThreads, 0, stream>>>(rows);
  check_launch("localize kernel");
}

}  // namespace moe::experts::detail
