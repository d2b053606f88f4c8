// SPDX-License-Identifier: Apache-2.0
// comm/nccl_symmetric.cuh: NcclSymmetric with the one kernel that needs NCCL's device header: it reads the peer addresses out of a window.
// At least one translation unit of a program includes it; all other kernels take raw peer pointers.
#pragma once

#include "moe/comm/nccl_device_api.hpp"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/core/cuda_space.hpp"

namespace moe::comm::detail {

static __global__ void resolve_peers_kernel(ncclWindow_t window, int ranks, char** out) {
  int const r = static_cast<int>(threadIdx.x);
  if (r < ranks) {
    out[r] = static_cast<char*>(ncclGetLsaPointer(window, 0, r));
  }
}

// Emitted even if no code of this file calls it, as the launches of the exchanges are.
[[gnu::used]] inline void resolve_peers(ncclWindow_t window, int ranks, char** out, cudaStream_t stream) {
  resolve_peers_kernel<<<1, 64, 0, stream>>>(window, ranks, out);
  check_cuda(cudaGetLastError(), "resolve_peers");
}

}  // namespace moe::comm::detail
