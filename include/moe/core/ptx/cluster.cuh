// SPDX-License-Identifier: Apache-2.0
// core/ptx/cluster.cuh: the blocks of a cluster: its barrier, and each other's shared memory. Architectures before sm_90 have no clusters:
// there barriers and stores do nothing, and every block is a cluster with one block.
#pragma once

#include "moe/core/ptx/shared_address.cuh"

namespace moe::ptx {

/// First half of the barrier over all threads of the cluster; whole warps call it. Orders this thread's earlier accesses before accesses of
/// the other threads after cluster_wait(). It waits for this block's earlier stores to global memory.
__device__ inline void cluster_arrive_release() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}
/// The same without memory ordering: only signals that this thread has arrived.
__device__ inline void cluster_arrive_relaxed() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
/// Second half: waits until all threads of the cluster have arrived.
__device__ inline void cluster_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

/// Rank of this block in its cluster.
__device__ inline int rank_in_cluster() {
#if __CUDA_ARCH__ >= 900
  std::uint32_t rank = 0;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}
/// Index of this block's cluster in the grid.
__device__ inline int cluster_in_grid() {
#if __CUDA_ARCH__ >= 900
  int cluster = 0;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
  return cluster;
#else
  return static_cast<int>(blockIdx.x);
#endif
}

/// The address in block `rank` of the cluster that corresponds to `address` in this block's shared memory.
__device__ inline std::uint32_t remote_address(std::uint32_t address, std::uint32_t rank) {
  std::uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  return remote;
}

/// Stores 16 bytes into block `rank` of the cluster, at the offset that `here` has in this block; that block's barrier counts them.
__device__ inline void store_remote_16([[maybe_unused]] void* here, [[maybe_unused]] std::uint64_t* barrier,
                                       [[maybe_unused]] std::uint32_t rank, [[maybe_unused]] uint4 v) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                   remote_address(smem_address(here), rank)),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(remote_address(smem_address(barrier), rank))
               : "memory");
#endif
}

// The following are for sm_90 only.

/// Arrives on the barrier of the CTA `rank` of this cluster (the same offset in that CTA's shared memory). It orders nothing beyond this
/// CTA: a release at cluster scope is a memory barrier of about 2000 cycles, too expensive for freeing a stage that was only read.
__device__ inline void arrive_cluster(std::uint64_t* barrier, std::uint32_t rank) {
  std::uint32_t remote = 0;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem_address(barrier)), "r"(rank));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}

/// Stores a word into the CTA `rank` of this cluster, at the offset that `local` has here.
__device__ inline void store_cluster(int* local, std::uint32_t rank, int value) {
  std::uint32_t remote = 0;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem_address(local)), "r"(rank));
  asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(remote), "r"(value) : "memory");
}
/// Loads a word from the CTA `rank` of this cluster, at the offset that `local` has here.
__device__ inline int load_cluster(int const* local, std::uint32_t rank) {
  std::uint32_t remote = 0;
  int value = 0;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(smem_address(local)), "r"(rank));
  asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(value) : "r"(remote) : "memory");
  return value;
}

}  // namespace moe::ptx
