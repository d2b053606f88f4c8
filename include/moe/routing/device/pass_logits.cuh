// SPDX-License-Identifier: Apache-2.0
// routing/device/pass_logits.cuh: the kernel of routing/pass_logits.hpp.
#pragma once

#include "moe/core/cuda_space.hpp"
#include "moe/routing/pass_logits.hpp"

namespace moe::routing {

namespace detail {
template <class L>
__global__ void pass_logits_kernel(RouteArgs<L> const a) {
  std::int64_t const columns = a.logits.extent(1);
  std::int64_t const at = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (at < a.logits.extent(0) * columns) pass_logit(a, at / columns, at % columns);
}
}  // namespace detail

template <class L>
void pass_logits(RouteArgs<L> const& a, Stream<space::cuda> stream) {
  constexpr int kThreads = 256;
  std::int64_t const slots = a.logits.extent(0) * a.logits.extent(1);
  if (slots == 0) return;
  detail::pass_logits_kernel<L><<<static_cast<unsigned>((slots + kThreads - 1) / kThreads), kThreads, 0, stream>>>(a);
  check_launch("pass_logits kernel");
}

}  // namespace moe::routing
