// SPDX-License-Identifier: Apache-2.0
// core/ptx/sm90.cuh: the sm_90a instructions that the expert kernels need and the CUDA C++ core libraries do not wrap.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cuda/ptx>

#include "moe/core/ptx/named_barrier.cuh"

namespace moe::hopper {

namespace ptx = cuda::ptx;

/// threadIdx.x, read where it is asked for: what is computed from it is not hoisted out of the loop over units, where it would occupy
/// registers during the products.
__device__ inline int thread_index() {
  int index = 0;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

/// Shared-memory address as the 32-bit number that descriptors and asm operands take.
__device__ inline std::uint32_t smem_address(void const* p) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p)); }

/// Ends the program with an error. In a function of its own: a trap among a role's own instructions makes ptxas ignore what setmaxnreg
/// grants that role (168 registers and spills, where with this call it uses 222).
__device__ __noinline__ inline void stop_program() { __trap(); }

/// Longest wait for a barrier in a kernel, nanoseconds: so long because `racecheck` slows kernels down to where four seconds pass.
inline constexpr std::uint64_t kWaitLimit = 60'000'000'000ULL;

/// Waits until the phase of `parity` of a shared-memory barrier is over. A wait beyond the limit is a fault in the program, not slowness:
/// it traps, so that the host sees an error instead of a hang.
__device__ inline void wait_parity(std::uint64_t* barrier, std::uint32_t parity) {
  if (ptx::mbarrier_try_wait_parity(barrier, parity)) return;
  std::uint64_t const start = ptx::get_sreg_globaltimer();
  for (std::uint32_t spin = 1; !ptx::mbarrier_try_wait_parity(barrier, parity); ++spin) {
    if ((spin & 0xFFFu) == 0 && ptx::get_sreg_globaltimer() - start > kWaitLimit) stop_program();
  }
}

__device__ inline void arrive(std::uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
}

/// Arrives `count` times at once.
__device__ inline void arrive(std::uint64_t* barrier, std::uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(count) : "memory");
}

/// Arrives on the barrier of the CTA `rank` of this cluster (the same offset in that CTA's shared memory). It orders nothing beyond this
/// CTA: a release at cluster scope is a memory barrier of about 2000 cycles, too dear for freeing a stage that was only read.
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

/// Waits for arrivals that may come from another CTA of the cluster, with their writes.
__device__ inline void wait_parity_cluster(std::uint64_t* barrier, std::uint32_t parity) {
  wait_parity(barrier, parity);
  ptx::fence(ptx::sem_acq_rel, ptx::scope_cluster);
}

/// Barrier over all threads of the cluster, in two halves, each reached by whole warps (cuda::ptx has the form without .aligned).
__device__ inline void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ inline void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

/// The barrier receives one arrival of this thread once all its earlier cp.async copies have landed. (cuda::ptx of CUDA 13.0 names no state
/// space here and passes an address of 32 bits.)
__device__ inline void cp_async_arrive(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

/// Asynchronous 16-byte copy, global to shared, past L1. Of the source `bytes` are read (16, or 0: nothing), the rest of the target is
/// zero.
__device__ inline void cp_async_16(std::uint32_t smem, void const* global, std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(bytes) : "memory");
}

/// Asynchronous 4-byte copy, global to shared.
__device__ inline void cp_async_4(std::uint32_t smem, void const* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(global) : "memory");
}

/// Copy of contiguous bytes (a multiple of 16; both addresses too) by the copy engine, completing on `barrier`. To targets that are no
/// multiples of 128 bytes it takes 30 % longer, in pieces of 1 KB 12 % longer than in pieces of 2 KB.
__device__ inline void bulk_load(void* smem, void const* global, std::uint32_t bytes, std::uint64_t* barrier, std::uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   smem_address(smem)),
               "l"(global), "r"(bytes), "r"(smem_address(barrier)), "l"(policy)
               : "memory");
}

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

__device__ inline std::uint64_t policy_evict_first() {
  std::uint64_t policy = 0;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ inline std::uint64_t policy_evict_normal() {
  std::uint64_t policy = 0;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

/// A hint: brings the line into L2.
__device__ inline void prefetch_l2(void const* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }

__device__ inline void prefetch_tensor_map(CUtensorMap const* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

/// Programmatic dependent launch: blocks until the kernels that this one depends on have finished and their writes are visible.
__device__ inline void wait_for_dependencies() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
/// Allows the next kernel to start its own prologue.
__device__ inline void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

template <int Registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

/// Orders this thread's accesses (and those it has observed) for the whole device; lighter than __threadfence(), which is sequentially
/// consistent.
__device__ inline void fence_device() { ptx::fence(ptx::sem_acq_rel, ptx::scope_gpu); }

__device__ inline int load_acquire(int const* p) {
  int value = 0;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

/// Adds to a counter in device memory, after this thread's accesses and those that it has observed.
__device__ inline void add_release(int* p, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

/// Spins until a counter in device memory has reached `target`.
__device__ inline void wait_counter(int const* counter, int target) {
  for (std::uint32_t spin = 0; load_acquire(counter) < target; ++spin) {
    __nanosleep(64);
    if (spin > 40'000'000u) stop_program();
  }
}

/// Transposing store of four (or two) 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void store_matrix_transposed_x4(std::uint32_t smem, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ inline void store_matrix_transposed_x2(std::uint32_t smem, std::uint32_t a, std::uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(smem), "r"(a), "r"(b) : "memory");
}

/// Store of four 8x8 matrices as they lie in the threads: lane l holds elements 2 (l % 4) and the next of row l / 4.
__device__ inline void store_matrix_x4(std::uint32_t smem, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ inline float load_shared(std::uint32_t smem) {
  float value = 0.0F;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(smem));
  return value;
}
__device__ inline float2 load_shared_2(std::uint32_t smem) {
  float2 value{};
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(smem));
  return value;
}
__device__ inline uint4 load_shared_16(std::uint32_t smem) {
  uint4 v{};
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(smem) : "memory");
  return v;
}

__device__ inline void store_shared(std::uint32_t smem, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem), "f"(value) : "memory");
}
__device__ inline void store_shared_8(std::uint32_t smem, std::uint32_t low, std::uint32_t high) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(smem), "r"(low), "r"(high) : "memory");
}

__device__ inline void wgmma_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// Keeps the compiler from moving accumulator registers across an asynchronous product.
template <int N>
__device__ inline void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// Matrix descriptor of a K-major operand in 128-byte swizzled rows: 8 rows of 128 bytes are one 1024-byte atom (PTX ISA, "matrix
/// descriptor": start address, stride offset 1024 >> 4 at bit 32, swizzle mode 1 at bit 62). `smem` is 1024-byte aligned up to the
/// offset along K, which is added to the start address.
__device__ inline std::uint64_t matrix_descriptor(std::uint32_t smem) {
  return static_cast<std::uint64_t>((smem & 0x3FFFFu) >> 4) | (1ULL << 16) | (64ULL << 32) | (1ULL << 62);
}
/// The same in two steps: the low word, to which offsets in 16 bytes may be added, and the whole.
__device__ inline std::uint32_t descriptor_low(std::uint32_t smem) { return (smem >> 4) | (1u << 16); }
__device__ inline std::uint64_t descriptor(std::uint32_t low) {
  std::uint64_t whole = 0;
  asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(low), "r"(0x40000040u));
  return whole;
}

/// Keeps a value in a register: the compiler forgets how it came about.
__device__ inline void keep(std::uint32_t& value) { asm volatile("" : "+r"(value)); }

/// True in one lane of a warp whose lanes are all here.
__device__ inline bool elect_one() {
  int elected = 0;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, p;\n}\n" : "=r"(elected)::"memory");
  return elected != 0;
}

/// A value that is the same in all lanes, made known as such to the compiler.
__device__ inline std::uint32_t uniform(std::uint32_t value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

}  // namespace moe::hopper
