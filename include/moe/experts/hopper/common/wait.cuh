// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/wait.cuh: how the expert kernels wait: for barriers in shared memory and for counters in device memory, with a
// limit.
#pragma once

#include <cstdint>

#include "moe/core/ptx/sm90.cuh"

namespace moe::hopper {

using namespace moe::ptx;

/// Ends the program with an error. It is a separate function because a trap inlined into a role makes ptxas ignore the registers that
/// setmaxnreg grants to the role (168 registers and spills; with this call 222 registers).
__device__ __noinline__ inline void stop_program() { __trap(); }

/// Longest wait for a barrier in a kernel, nanoseconds. It is long because `racecheck` slows kernels down so far that four seconds pass,
/// and since rows of another rank may come as late as the deadline of an exchange allows (100 s by default).
inline constexpr std::uint64_t kWaitLimit = 600'000'000'000ULL;
/// Likewise of a wait for a counter, in loads of the counter: several minutes.
inline constexpr std::uint32_t kSpinLimit = 1'000'000'000U;

/// Waits until the phase of `parity` of a shared-memory barrier is over. A wait beyond the limit is a program fault, not slowness:
/// it traps, so that the host sees an error instead of a hang.
__device__ inline void wait_parity(std::uint64_t* barrier, std::uint32_t parity) {
  if (ptx::mbarrier_try_wait_parity(barrier, parity)) return;
  std::uint64_t const start = ptx::get_sreg_globaltimer();
  for (std::uint32_t spin = 1; !ptx::mbarrier_try_wait_parity(barrier, parity); ++spin) {
    if ((spin & 0xFFFu) == 0 && ptx::get_sreg_globaltimer() - start > kWaitLimit) stop_program();
  }
}

/// Waits for arrivals that may come from another CTA of the cluster, with their writes.
__device__ inline void wait_parity_cluster(std::uint64_t* barrier, std::uint32_t parity) {
  wait_parity(barrier, parity);
  ptx::fence(ptx::sem_acq_rel, ptx::scope_cluster);
}

/// Spins until a counter in device memory has reached `target`.
__device__ inline void wait_counter(int const* counter, int target) {
  for (std::uint32_t spin = 0; load_acquire_gpu(counter) < target; ++spin) {
    __nanosleep(64);
    if (spin > kSpinLimit) stop_program();
  }
}

}  // namespace moe::hopper
