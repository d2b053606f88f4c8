// SPDX-License-Identifier: Apache-2.0
// experts/hopper/token/launch.cuh: the launch of the one-token kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/token/token_kernel.cuh"

namespace moe::hopper {

/// `scheme` is bf16 or fp8_block; every one of the `workers` blocks must be resident.
inline void launch_token(TokenParams const& p, Scheme scheme, int workers, cudaStream_t stream) {
  auto const run = [&]<Scheme S>() {
    detail::allow_shared_memory<token_kernel<S>>(kTokenSharedMemory);
    detail::launch(token_kernel<S>, workers, p.plan.warps * 32, p.plan.bytes, 1, stream, p);
  };
  if (scheme == Scheme::fp8_block) {
    run.template operator()<Scheme::fp8_block>();
  } else {
    run.template operator()<Scheme::bf16>();
  }
}

}  // namespace moe::hopper
