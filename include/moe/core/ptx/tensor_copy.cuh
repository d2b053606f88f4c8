// SPDX-License-Identifier: Apache-2.0
// core/ptx/tensor_copy.cuh: copies of boxes of a tensor map by the copy engine of sm_90.
#pragma once

#include <cuda.h>

#include "moe/core/ptx/shared_address.cuh"

namespace moe::ptx {

/// Tensor-map copy of a 3-dimensional box into this CTA, completing on `barrier`; `policy` is an L2 cache policy.
__device__ inline void tma_load(void* smem, CUtensorMap const* map, std::uint64_t* barrier, int c0, int c1, int c2, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], "
      "%6;" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
      : "memory");
}

/// The same into the same offset of every CTA of the cluster named in `mask`, completing on each one's own barrier.
__device__ inline void tma_load_multicast(void* smem, CUtensorMap const* map, std::uint64_t* barrier, int c0, int c1, int c2,
                                          std::uint16_t mask, std::uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint [%0], [%1, {%3, "
      "%4, "
      "%5}], [%2], %6, %7;" ::"r"(smem_address(smem)),
      "l"(map), "r"(smem_address(barrier)), "r"(c0), "r"(c1), "r"(c2), "h"(mask), "l"(policy)
      : "memory");
}

__device__ inline void prefetch_tensor_map(CUtensorMap const* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

}  // namespace moe::ptx
