// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/roles.cuh: what the warp roles of a layer kernel share: their position in the ring, the announced units, their
// barriers.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/common/problem.hpp"
#include "moe/experts/hopper/common/schedule.cuh"
#include "moe/experts/hopper/common/wait.cuh"

namespace moe::hopper {

/// The ring position of one role: all roles walk the same sequence of stages.
template <int Stages>
struct RingState {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1u;
    }
  }
  __device__ void advance(int steps) {
    unsigned const to = static_cast<unsigned>(stage + steps);
    stage = static_cast<int>(to % Stages);
    parity ^= to / Stages & 1u;
  }
};

/// The next unit that the loading thread announces. Every reading thread releases the entry that it read; lanes may return at different
/// times.
template <class Memory, class Position>
__device__ inline Unit next_unit(Memory const& memory, Position& at) {
  wait_parity(memory.unit_full(at.stage), at.parity);
  Unit const unit = *memory.unit(at.stage);
  arrive(memory.unit_empty(at.stage));
  at.advance();
  return unit;
}

/// Clusters of two: the first CTA draws a number for both and sends it on when it has arrived, by the first or second step of the unit.
template <class Memory>
__device__ inline void send_number(Memory const& memory, int entry, int number) {
  store_cluster(memory.number(entry), 1, number);
  ptx::fence(ptx::sem_acq_rel, ptx::scope_cluster);
  arrive_cluster(memory.number_full(entry), 1);
}
/// At the end of a unit, in both CTAs: the next number.
template <class Memory>
__device__ inline void receive_number(Memory const& memory, RingState<kUnitEntries>& drawn, int rank, int& number) {
  if (rank == 1) {
    wait_parity_cluster(memory.number_full(drawn.stage), drawn.parity);
    number = *static_cast<int volatile*>(memory.number(drawn.stage));
  }
  drawn.advance();
}

inline constexpr int kGroupBarrier = 1;  ///< named barriers from here on: one per consumer warpgroup, then one of all consumer warpgroups

/// Barrier of the 128 threads of a consumer warpgroup.
__device__ inline void group_barrier(int group) { named_barrier(kGroupBarrier + group, 128); }
/// Barrier of all consumer warpgroups.
template <int Groups>
__device__ inline void joint_barrier() {
  named_barrier(kGroupBarrier + Groups, 128 * Groups);
}

}  // namespace moe::hopper
