// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/masks.cuh: the low-latency exchange among ranks that may die. docs/semantics/exchange.md §8.4.
//
// A call decides at two points which ranks are dead, each time in one block, so that the whole rank agrees: after the rows have been sent
// (low_latency_collect) and before outputs are read (low_latency_meet). A row's position depends on no other source's count, so ranks need
// not agree about dead ranks; each receiver packs its batches by index from the rows of the ranks that it found alive.
#pragma once

#include "moe/backends/window/device/common/rows.cuh"
#include "moe/backends/window/device/low_latency/params.hpp"

namespace moe::detail {

inline constexpr int kMaskThreads = 1024;

/// Waits for this rank's word at `p`. If the deadline has passed, or another thread has found so, rank `peer` is dead. `dead`: shared
/// memory, in atomic accesses only while threads wait.
static __device__ __noinline__ bool wait_or_mask(comm::WindowView const& w, std::uint32_t const* p, std::uint32_t round,
                                                 comm::ExchangePhase phase, int peer, std::uint64_t start, int* dead) {
  using namespace comm::detail;
  for (;;) {
    for (int i = 0; i < 64; ++i) {
      if (comm::round_reached(ptx::load_acquire_system(p), round)) {
        return true;
      }
    }
    if (atomicOr(dead, 0) != 0) {
      return false;
    }
    std::uint32_t const aborted = ptx::load_relaxed_system(own<std::uint32_t>(w, comm::WindowControl::abort_word));
    if (aborted != 0) {
      fail(w, ErrorCode::peer, phase, static_cast<int>(aborted >> 8) - 1, round, 0);
      return false;
    }
    if (w.timeout_ns != 0 && ptx::now_ns() - start > w.timeout_ns) {
      atomicExch(dead, 1);
      return false;
    }
  }
}

struct LowLatencyCollect : LowLatencyKernelParams {
  int parity = 0;
  std::int32_t* expert_num_tokens = nullptr;  ///< out [L]
  std::int64_t* expert_totals = nullptr;      ///< optional [L]
};

/// One block: waits for the rows of live ranks, masks ranks whose rows do not arrive, packs the batches by index.
static __global__ void __launch_bounds__(kMaskThreads, 1) low_latency_collect(LowLatencyCollect const __grid_constant__ a) {
  using namespace comm::detail;
  __shared__ int dead[comm::kMaxWindowRanks];
  begin_dependent_kernel();
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const R = w.size;
  int const L = a.local_experts;
  std::uint32_t* const masked = own<std::uint32_t>(w, comm::WindowControl::masked);
  std::uint32_t const round = own<std::uint32_t>(w, a.at.received)[0] + 1;
  std::uint64_t const start = ptx::now_ns();
  if (tid < R) {
    dead[tid] = masked[tid] != 0 ? 1 : 0;
  }
  __syncthreads();
  for (int i = tid; i < R * a.blocks; i += kMaskThreads) {
    int const from = i % R;
    int const b = i / R;
    if (atomicOr(&dead[from], 0) == 0) {
      bool const came = wait_or_mask(w, own<std::uint32_t>(w, a.at.arrive) + from * kMaxExchangeBlocks + b, round,
                                     comm::ExchangePhase::dispatch_rows, from, start, &dead[from]);
      if (b == 0 && w.statistics) {
        note_wait(w, from, start);
      }
      if (came && b == 0) {
        check_refusal(w, comm::ExchangePhase::dispatch_rows, from, round);
      }
    }
  }
  __syncthreads();
  if (tid < R && dead[tid] != 0) {
    masked[tid] = 1;
  }
  std::uint64_t const* const counts = own<std::uint64_t>(w, a.at.counts[a.parity]);
  std::int32_t* const bases = own<std::int32_t>(w, a.at.bases[a.parity]);
  int const lane = tid % 32;
  for (int le = tid / 32; le < L; le += kMaskThreads / 32) {
    std::int32_t* const gather = own<std::int32_t>(w, a.at.gather[a.parity]) + static_cast<std::size_t>(le) * a.capacity;
    int end = 0;
    for (int from = 0; from < R; ++from) {
      std::uint64_t const word =
          dead[from] != 0 ? 0 : ptx::load_relaxed_system(counts + static_cast<std::size_t>(from) * a.at.count_stride + w.rank * L + le);
      if (dead[from] == 0 && comm::word_tag(word) != a.tag && lane == 0) {
        fail(w, ErrorCode::mismatch, comm::ExchangePhase::dispatch_counts, from, round, comm::word_tag(word), a.tag);
      }
      int const n = dead[from] != 0 ? 0 : min(static_cast<int>(comm::word_count(word)), a.max_tokens);
      for (int i = lane; i < n; i += 32) {
        gather[end + i] = le * a.capacity + from * a.max_tokens + i;
      }
      if (lane == 0) {
        bases[le * R + from] = end;
      }
      end += n;
    }
    if (lane == 0) {
      a.expert_num_tokens[le] = end;
      if (a.expert_totals != nullptr) {
        a.expert_totals[le] += end;
      }
    }
  }
  for (int b = tid; b < kMaxExchangeBlocks; b += kMaskThreads) {
    own<std::uint32_t>(w, a.at.received)[b] = round;
  }
}

struct LowLatencyMeet : LowLatencyKernelParams {
  std::uint32_t refused = 0;
};

/// One block: tells live ranks that this rank's outputs are ready, waits for theirs, masks ranks that do not answer.
static __global__ void __launch_bounds__(comm::kMaxWindowRanks, 1) low_latency_meet(LowLatencyMeet const __grid_constant__ a) {
  using namespace comm::detail;
  __shared__ int dead[comm::kMaxWindowRanks];
  begin_dependent_kernel();  // the outputs must be complete before peers are told
  comm::WindowView const& w = a.window;
  int const r = static_cast<int>(threadIdx.x);
  std::uint32_t* const masked = own<std::uint32_t>(w, comm::WindowControl::masked);
  std::uint32_t const round = own<std::uint32_t>(w, a.at.combined)[0] + 1;
  if (r < w.size && masked[r] == 0) {
    std::uint64_t const start = ptx::now_ns();
    dead[r] = 0;
    if (a.refused != 0) {
      refuse(w, r, round, a.refused);
    }
    publish(at<std::uint32_t>(w, r, a.at.ready) + w.rank, round);
    if (wait_or_mask(w, own<std::uint32_t>(w, a.at.ready) + r, round, comm::ExchangePhase::combine_rows, r, start, &dead[r])) {
      check_refusal(w, comm::ExchangePhase::combine_rows, r, round);
    } else {
      masked[r] = 1;
    }
    if (w.statistics) {
      note_wait(w, r, start);
    }
  }
  __syncthreads();
  for (int b = r; b < kMaxExchangeBlocks; b += static_cast<int>(blockDim.x)) {
    own<std::uint32_t>(w, a.at.combined)[b] = round;
  }
}

/// Collective, between window_barrier kernels. Step 0: sends this rank's round to all. Step 1: adopts the latest round of all ranks and
/// clears all masks.
static __global__ void low_latency_rejoin(comm::WindowView const __grid_constant__ w, LowLatencyLayout const __grid_constant__ at,
                                          int step) {
  using namespace comm::detail;
  int const r = static_cast<int>(threadIdx.x);
  if (step == 0) {
    if (r < w.size) {
      std::uint32_t const own_round = own<std::uint32_t>(w, at.sent)[0];
      std::uint32_t const combined = own<std::uint32_t>(w, at.combined)[0];
      ptx::store_relaxed_system(comm::detail::at<std::uint32_t>(w, r, comm::WindowControl::rejoin) + w.rank,
                                comm::round_reached(combined, own_round) ? combined : own_round);
    }
    return;
  }
  std::uint32_t latest = ptx::load_relaxed_system(own<std::uint32_t>(w, comm::WindowControl::rejoin));
  for (int p = 1; p < w.size; ++p) {
    std::uint32_t const other = ptx::load_relaxed_system(own<std::uint32_t>(w, comm::WindowControl::rejoin) + p);
    latest = comm::round_reached(other, latest) ? other : latest;
  }
  for (int b = r; b < kMaxExchangeBlocks; b += static_cast<int>(blockDim.x)) {
    own<std::uint32_t>(w, at.sent)[b] = latest;
    own<std::uint32_t>(w, at.received)[b] = latest;
    own<std::uint32_t>(w, at.combined)[b] = latest;
  }
  if (r < w.size) {
    own<std::uint32_t>(w, comm::WindowControl::masked)[r] = 0;
  }
}

}  // namespace moe::detail
