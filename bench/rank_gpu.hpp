// SPDX-License-Identifier: Apache-2.0
// bench/rank_gpu.hpp: the GPU of a rank, for benchmarks with one process per GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>

#include "moe/core/cuda_space.hpp"

namespace moe_bench {

/// Makes GPU `rank` the current one. False, with a line of output, if there are fewer GPUs than ranks.
inline bool take_gpu(int rank, int ranks) {
  int devices = 0;
  cudaGetDeviceCount(&devices);
  if (devices < ranks) {
    std::printf("%d ranks need as many GPUs, found %d: nothing to measure\n", ranks, devices);
    return false;
  }
  moe::check_cuda(cudaSetDevice(rank), "cudaSetDevice");
  return true;
}

}  // namespace moe_bench
