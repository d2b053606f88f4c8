// SPDX-License-Identifier: Apache-2.0
// experts/hopper/token/launch.cuh: the launch of the one-token kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/token/token_kernel.cuh"

namespace moe::hopper {

/// `scheme` is bf16 or fp8_block; every one of the `workers` blocks must be resident.
inline void launch_token(TokenParams const& p, Scheme scheme, int workers, cudaStream_t stream) {
  bool const fp8 = scheme == Scheme::fp8_block;
  auto const kernel = fp8 ? token_kernel<Scheme::fp8_block> : token_kernel<Scheme::bf16>;
  static detail::OncePerDevice once[2];
  detail::allow_shared_memory(kernel, kTokenSharedMemory, once[fp8 ? 1 : 0]);
  detail::launch(kernel, workers, p.plan.warps * 32, p.plan.bytes, 1, stream, p);
}

}  // namespace moe::hopper
