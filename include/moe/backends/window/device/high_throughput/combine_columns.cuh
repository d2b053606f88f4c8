// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/combine_columns.cuh: the combine of a layout with column blocks: it may run beside the experts and
// follow them, block by block. docs/semantics/exchange.md §7.5, docs/architecture.md, "One schedule".
#pragma once

#include "moe/backends/window/device/high_throughput/combine.cuh"

namespace moe::detail {

struct HighThroughputColumns : HighThroughputCombine {
  int columns = 0;          ///< of a block but the last
  int column_blocks = 0;    ///< words of each rank
  bool completing = false;  ///< this rank's experts tell the blocks and may still run; else they have ended before this kernel
};

/// What one pass over the tokens sums: one block of columns.
struct HighThroughputColumnBlock {
  int first, last;  ///< columns
  __device__ int begin() const { return 2 * first; }
  __device__ int end(int /*hidden*/) const { return 2 * last; }
};

/// One thread per rank of the first block, before it waits for anything: publishes that peers may read this rank's rows, by the words of
/// the column blocks for combines beside experts and by the ready flag for combines behind them. With a refusal the rows have any contents,
/// and a peer that sees a word also sees the refusal.
__device__ inline void tell_columns(HighThroughputColumns const& a, std::uint32_t meeting, std::uint32_t round) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && tid < w.size) {
    if (a.refused != 0) {
      refuse(w, tid, meeting, a.refused);
    }
    ptx::fence_system();
    std::uint32_t* const words = at<std::uint32_t>(w, tid, a.at.complete[a.parity.rows]) + w.rank;
#pragma unroll 1
    for (int b = 0; b < a.column_blocks; ++b) {
      ptx::store_relaxed_system(words + b * w.size, round);
    }
    ptx::store_relaxed_system(at<std::uint32_t>(w, tid, a.at.ready) + w.rank, meeting);
  }
}

/// All threads: for each block of columns, one thread per rank waits until the rows of that rank are complete there; then the warps sum
/// these columns of their tokens. Blocks without tokens wait, too: when this returns, all experts of all ranks have read all that they read
/// of the dispatch. It may start before the experts end, but not before the combine that this parity had before has ended, whose words give
/// `round`. All else that it reads it reads after a word of this rank, which its experts wrote after the dispatch. False: a wait failed.
__device__ inline bool follow_experts(HighThroughputColumns const& a, std::uint32_t round, unsigned char* memory, std::uint64_t* full) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  if (tid % 32 < a.stages) {
    ptx::barrier_init(&full[tid % 32], 1);
    ptx::fence_shared_to_bulk();
  }
  std::uint32_t const* const words = own<std::uint32_t>(w, a.at.complete[a.parity.rows]);
  HighThroughputRing ring;
#pragma unroll 1
  for (int b = 0; b < a.column_blocks; ++b) {
    bool const waits = tid < w.size;
    bool const there = !waits || wait_round(w, words + b * w.size + tid, round, comm::ExchangePhase::combine_rows, tid);
    if (__syncthreads_or(there ? 0 : 1) != 0) {
      return false;
    }
    ptx::fence_bulk();  // the copy engine reads what the words cover
    int const first = b * a.columns;
    sum_tokens(a, HighThroughputColumnBlock{first, min(first + a.columns, a.hidden)}, memory, full, ring);
  }
  return true;
}

/// One thread per rank of the first block: reports who refused this combine or one of the two before it: a rank may give up when its
/// experts have told all blocks, so that a combine of complete rows ends before the refusal is there. The refusal is there when the next
/// dispatch has ended, and at most two combines stand between two dispatches. Words with other numbers belong to later dispatches; those of
/// dispatches up to this one have been reported and cleared.
__device__ inline void check_refusals(HighThroughputColumns const& a, std::uint32_t meeting) {
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && tid < w.size) {
#pragma unroll 1
    for (std::uint32_t round = meeting - 2; round != meeting + 1; ++round) {
      comm::detail::check_refusal(w, comm::ExchangePhase::combine_rows, tid, round);
    }
  }
}

/// All threads, the end of a combine beside the experts: waits for the end of the experts and of the rows' kernel, so that what follows in
/// the stream has them behind it, then tells all ranks. Returns the number of this combine among all. The kernel before this one may be a
/// combine, so that number is read after the wait.
__device__ inline std::uint32_t end_beside_experts(HighThroughputColumns const& a) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  ptx::wait_for_dependencies();
  std::uint32_t const meeting = ptx::load_relaxed_system(own<std::uint32_t>(w, a.at.combined) + blockIdx.x) + 1;
  if (a.waits_for_moves && tid == 0) {
    wait_round(w, own<std::uint32_t>(w, a.at.moved[a.parity.rows]), kMoved, comm::ExchangePhase::dispatch_rows, w.rank);
  }
  __syncthreads();
  check_refusals(a, meeting);
  if (blockIdx.x == 0 && tid < w.size) {
    publish(at<std::uint32_t>(w, tid, a.at.ready) + w.rank, meeting);
  }
  return meeting;
}

static __global__ void __launch_bounds__(32 * kHighThroughputWarps, 1)
    high_throughput_combine_columns(HighThroughputColumns const __grid_constant__ a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ std::uint64_t full[kHighThroughputWarps][kHighThroughputStages];
  __shared__ int failed;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const warp = tid / 32;
  int const block = static_cast<int>(blockIdx.x);
  std::size_t const ring_bytes = static_cast<std::size_t>(a.stages) * min(a.topk, w.size) * a.piece_bytes;
  unsigned char* const memory = shared + warp * ring_bytes;
  std::uint32_t* const finished = own<std::uint32_t>(w, a.at.finished[a.parity.rows]);

  std::uint32_t round, meeting;
  if (a.completing) {
    ptx::launch_dependents();
    round = ptx::load_relaxed_system(finished + block) + 1;
    follow_experts(a, round, memory, full[warp]);
    meeting = end_beside_experts(a);
  } else {
    begin_dependent_kernel();
    if (a.waits_for_moves && tid == 0) {  // the barrier of meet_ranks() holds the others
      wait_round(w, own<std::uint32_t>(w, a.at.moved[a.parity.rows]), kMoved, comm::ExchangePhase::dispatch_rows, w.rank);
    }
    round = finished[block] + 1;
    meeting = own<std::uint32_t>(w, a.at.combined)[block] + 1;
    tell_columns(a, meeting, round);
    if (meet_ranks<false>(a, meeting, full[warp], &failed)) {
      HighThroughputRing ring;
      sum_tokens(a, HighThroughputWholeRows{}, memory, full[warp], ring);
    }
    check_refusals(a, meeting);
  }

  __syncthreads();
  if (tid == 0) {
#pragma unroll 1
    for (int b = block; b < kMaxExchangeBlocks; b += static_cast<int>(gridDim.x)) {
      own<std::uint32_t>(w, a.at.combined)[b] = meeting;
      finished[b] = round;
    }
  }
}

}  // namespace moe::detail
