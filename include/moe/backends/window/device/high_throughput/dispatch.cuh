// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/dispatch.cuh: layout, counts and rows in one kernel of few blocks; the copy engine moves the rows.
// docs/semantics/exchange.md §7.
//
// Each block owns a contiguous range of tokens. Blocks exchange histograms within the rank, and ranks exchange counts; then all row
// positions are known: the row of a token at each rank (sources in rank order, tokens in order) and the position of each choice in the
// expert-major list. Meanwhile the warps that do no planning prepare their first row. Then each warp takes tokens, first from its block's
// range, then from slower blocks: it quantises a token once into shared memory, and the copy engine stores it to every destination rank.
#pragma once

#include "moe/backends/window/device/high_throughput/positions.cuh"
#include "moe/backends/window/device/high_throughput/tickets.cuh"
#include "moe/core/ptx/bulk_copy.cuh"
#include "moe/core/ptx/mbarrier.cuh"

namespace moe::detail {

inline constexpr int kHighThroughputWarps = 16;
inline constexpr int kHighThroughputShared = 220 * 1024;  ///< bytes of dynamic shared memory that one block may take

/// Bytes of one warp's row.
MOE_HD inline int high_throughput_row_shared(int hidden, bool fp8) {
  int const bytes = fp8 ? hidden + 4 * ((hidden + 127) / 128) : 2 * hidden;
  return (bytes + 127) / 128 * 128;
}
inline int high_throughput_dispatch_warps(HighThroughputShape const& s) {
  return std::clamp(kHighThroughputShared / high_throughput_row_shared(s.hidden, s.fp8), 1, kHighThroughputWarps);
}
/// Bytes before the rows of the non-planner warps: the planners' tables, and later the planners' rows.
MOE_HD inline int high_throughput_planned_shared(int n, int planners, int row_shared) {
  int const tables = (4 * n * (planners + 2) + 127) / 128 * 128;
  return tables > planners * row_shared ? tables : planners * row_shared;
}
inline std::size_t high_throughput_dispatch_shared(HighThroughputShape const& s) {
  int const warps = high_throughput_dispatch_warps(s);
  int const row = high_throughput_row_shared(s.hidden, s.fp8);
  int const n = s.num_experts + s.ranks;
  int const planners = high_throughput_planners(n, warps);
  return static_cast<std::size_t>(high_throughput_planned_shared(n, planners, row) + (warps - planners) * row);
}

/// Destinations of one token, a rank per lane. The first rank differs between source ranks and between tokens.
struct HighThroughputTargets {
  int rank;            ///< of this lane
  int row = -1;        ///< of the token there, or -1
  int position = -1;   ///< of this lane's choice in its expert's list, or -1
  unsigned lanes = 0;  ///< mask of lanes whose rank gets the token

  __device__ HighThroughputTargets(comm::WindowView const& w, int t) {
    rank = static_cast<int>(threadIdx.x) % 32 + (w.rank + t) % w.size;
    rank = rank >= w.size ? rank - w.size : rank;
  }
  /// Call it when the row positions are known. `sent_rows`: [T][R], `sent_positions`: [T][k].
  __device__ void look_up(HighThroughputDispatch const& a, std::int32_t const* sent_rows, std::int32_t const* sent_positions, int t) {
    int const lane = static_cast<int>(threadIdx.x) % 32;
    int const R = a.window.size;
    row = lane < R ? sent_rows[t * R + rank] : -1;
    position = a.lists && lane < a.topk ? sent_positions[t * a.topk + lane] : -1;
    lanes = __ballot_sync(0xffffffffU, row >= 0);
  }
};

/// One warp: writes a token's row in wire format into shared memory, once the copy engine has read this warp's previous row. `loaded` is
/// the warp's barrier, `phase` its parity.
template <bool kFp8>
__device__ inline void stage_row(HighThroughputDispatch const& a, int t, unsigned char* row, std::uint64_t* loaded, std::uint32_t& phase) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  __nv_bfloat16 const* const x = a.in.x + t * a.in.x_stride;
  if constexpr (kFp8) {
    quantize_row<7>(x, a.hidden, a.scales, lane, row, reinterpret_cast<float*>(row + a.hidden));
  } else {
    ptx::bulk_wait_read();
    __syncwarp();
    if (lane == 0) {
      ptx::barrier_expect(loaded, 2 * a.hidden);
      ptx::bulk_load(row, x, 2 * a.hidden, loaded);
    }
    __syncwarp();
    ptx::barrier_wait(loaded, phase);
    phase ^= 1;
  }
}

/// One warp: stores the staged row to all its ranks, piece by piece, and its scales if they are whole 16-byte vectors. Does not wait.
template <bool kFp8>
__device__ inline void store_row(HighThroughputDispatch const& a, HighThroughputTargets const& to, unsigned char const* row) {
  comm::WindowView const& w = a.window;
  int const groups = (a.hidden + 127) / 128;
  char* const target =
      to.row < 0 ? nullptr : w.peer[to.rank] + a.at.rows[a.parity.rows] + static_cast<std::size_t>(to.row) * a.at.row_bytes;
#pragma unroll 1
  for (int offset = 0; offset < a.at.row_bytes; offset += a.piece_bytes) {
    if (to.row >= 0) {
      ptx::bulk_store(target + offset, row + offset, min(a.piece_bytes, a.at.row_bytes - offset));
    }
    __syncwarp();
  }
  if (to.row >= 0) {
    if (kFp8 && groups % 4 == 0) {
      ptx::bulk_store(w.peer[to.rank] + a.at.scales[a.parity.rows] + static_cast<std::size_t>(to.row) * a.at.scale_stride * 4,
                      row + a.hidden, groups * 4);
    }
    ptx::bulk_commit();
  }
}

/// One warp: stores the scales of the staged row at rank r if they are no whole 16-byte vectors, which store_row() leaves out.
__device__ inline void store_odd_scales(HighThroughputDispatch const& a, int r, std::size_t index, unsigned char const* row) {
  int const groups = (a.hidden + 127) / 128;
  if (groups % 4 == 0) {
    return;
  }
  float* const target = comm::detail::at<float>(a.window, r, a.at.scales[a.parity.rows]) + index * a.at.scale_stride;
#pragma unroll 1
  for (int g = static_cast<int>(threadIdx.x) % 32; g < groups; g += 32) {
    target[g] = reinterpret_cast<float const*>(row + a.hidden)[g];
  }
}

/// One warp: stores the record of a row at a rank: local ids, weights and row positions in lists of its choices, then its source. `expert`,
/// `weight`: of this lane's choice.
template <bool kFp8>
__device__ inline void write_records(HighThroughputDispatch const& a, HighThroughputTargets const& to, int t, int expert, float weight,
                                     unsigned char const* row) {
  using comm::detail::at;
  comm::WindowView const& w = a.window;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const K = a.topk;
  int const dst = expert >= 0 ? expert / a.local_experts : -1;
#pragma unroll 1
  for (unsigned left = to.lanes; left != 0; left &= left - 1) {
    int const from = __ffs(left) - 1;
    int const r = __shfl_sync(0xffffffffU, to.rank, from);
    auto const index = static_cast<std::size_t>(__shfl_sync(0xffffffffU, to.row, from));
    bool const mine = dst == r;
    // The warp stores records in pieces of up to 128 bytes, one store each: word i is choice i % K of part i / K.
    std::uint32_t const parts[3] = {static_cast<std::uint32_t>(mine ? expert - r * a.local_experts : -1),
                                    mine ? __float_as_uint(weight) : 0U, static_cast<std::uint32_t>(mine ? to.position : -1)};
    std::uint32_t* const record = at<std::uint32_t>(w, r, a.at.records[a.parity.rows]) + index * a.at.record_words;
    int const used = (a.lists ? 3 : 2) * K;
#pragma unroll 1
    for (int c = 0; c < a.at.record_words; c += 32) {
      int const i = c + lane;
      int const j = i < K ? i : i < 2 * K ? i - K : i - 2 * K;
      std::uint32_t const id = __shfl_sync(0xffffffffU, parts[0], j & 31);
      std::uint32_t const bits = __shfl_sync(0xffffffffU, parts[1], j & 31);
      std::uint32_t const position = __shfl_sync(0xffffffffU, parts[2], j & 31);
      if (i < a.at.record_words) {
        record[i] = i >= used ? static_cast<std::uint32_t>(w.rank * a.max_tokens + t) : i < K ? id : i < 2 * K ? bits : position;
      }
    }

    if (a.lists && mine) {
      at<std::int32_t>(w, r, a.at.list[a.parity.rows])[to.position] = static_cast<std::int32_t>(index);
    }
    if (kFp8 && !a.arriving) {
      store_odd_scales(a, r, index, row);
    }
  }
}

/// The tokens that one warp moves. The first is fixed; if some block has more tokens than warps, tickets assign the others.
struct HighThroughputMover {
  unsigned char* row;     ///< in shared memory
  std::uint64_t* loaded;  ///< barrier of the row
  std::uint64_t* positions_known;
  int t, t_last;
  bool shares;  ///< tickets assign the tokens after the first
  bool known;   ///< the row positions are known
};

/// One warp takes tokens, stages each once and sends it. A non-planner warp stages its first row before the row positions are known, and
/// then waits for its block's planners. False if no row may move.
template <bool kFp8>
__device__ inline bool send_tokens(HighThroughputDispatch const& a, HighThroughputBlock const& state, HighThroughputTickets& tickets,
                                   HighThroughputMover m) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  std::int32_t const* const sent_rows = comm::detail::own<std::int32_t>(a.window, a.at.sent_rows[a.parity.routing]);
  std::int32_t const* const sent_positions = comm::detail::own<std::int32_t>(a.window, a.at.sent_positions[a.parity.routing]);
  std::uint64_t ticket = 0;
  std::uint32_t phase = 0;
#pragma unroll 1
  for (bool first = m.t < m.t_last;; first = false) {
    if (!first) {
      m.t = m.shares ? tickets.take(ticket) : -1;
      if (m.t < 0) {
        break;
      }
    }
    HighThroughputTargets to(a.window, m.t);
    if (m.known) {
      to.look_up(a, sent_rows, sent_positions, m.t);
    }
    int const e = lane < a.topk ? expert_of(a.in.ids[m.t * a.topk + lane], a.experts) : -1;
    float const weight = lane < a.topk ? a.in.weights[m.t * a.topk + lane] : 0.0F;
    if (m.known && to.lanes == 0) {
      ticket = m.shares ? tickets.ask() : 0;
      continue;
    }

    if (!a.arriving) {
      stage_row<kFp8>(a, m.t, m.row, m.loaded, phase);
    }
    if (!m.known) {
      ptx::barrier_wait(m.positions_known, 0);
      m.known = true;
      if (state.failed != 0 || state.overflown != 0) {
        break;
      }
      to.look_up(a, sent_rows, sent_positions, m.t);
    }

    if (!a.arriving) {
      store_row<kFp8>(a, to, m.row);
    }
    ticket = m.shares ? tickets.ask() : 0;
    write_records<kFp8>(a, to, m.t, e, weight, m.row);
  }
  return state.failed == 0 && state.overflown == 0;
}

/// All warps: clears the ids of the rows from `first` on, which no sender writes.
__device__ inline void clear_ids(HighThroughputDispatch const& a, int first) {
  int const warp = static_cast<int>(threadIdx.x) / 32;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const warps = static_cast<int>(blockDim.x) / 32;
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int r = first + block * warps + warp; r < a.capacity; r += blocks * warps) {
    if (lane < a.topk) {
      comm::detail::own<std::int32_t>(a.window, a.at.records[a.parity.rows])[static_cast<std::size_t>(r) * a.at.record_words + lane] = -1;
    }
  }
}

/// All warps, before publish_and_receive(): clears the counts of the rows that high_throughput_rows will bring. No peer counts before it
/// has seen this rank's flags, and the combine of the dispatch that used them before has waited for their last change.
__device__ inline void clear_arrivals(HighThroughputDispatch const& a) {
  int const first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
#pragma unroll 1
  for (int i = first; i < a.window.size * a.local_experts; i += static_cast<int>(gridDim.x * blockDim.x)) {
    comm::detail::own<std::uint32_t>(a.window, a.at.arrived[a.parity.rows])[i] = 0;
  }
  if (first == 0) {
    *comm::detail::own<std::uint32_t>(a.window, a.at.moved[a.parity.rows]) = a.arriving ? 0 : kMoved;
  }
}

/// All warps, after enqueuing their rows: when the block's rows are complete, one thread per rank publishes them, then waits for the rows
/// from that rank's block of the same index.
__device__ inline void publish_and_receive(HighThroughputDispatch const& a, HighThroughputBlock const& state, std::uint32_t round) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const block = static_cast<int>(blockIdx.x);
  ptx::bulk_wait();
  ptx::fence_bulk();
  __syncthreads();

  if (tid < w.size) {
    if (a.refused != 0 && block == 0) {
      refuse(w, tid, round, a.refused);
    }
    publish(at<std::uint32_t>(w, tid, a.at.arrive) + w.rank * kMaxExchangeBlocks + block, round);
  }
  clear_ids(a, state.num_rows);
  if (tid < w.size &&
      wait_round(w, own<std::uint32_t>(w, a.at.arrive) + tid * kMaxExchangeBlocks + block, round, comm::ExchangePhase::dispatch_rows,
                 tid) &&
      block == 0) {
    check_refusal(w, comm::ExchangePhase::dispatch_rows, tid, round);
  }
}

/// Cached: takes the number of received rows from the call that filled the row positions, and fills the gaps of the lists.
__device__ inline void reuse_positions(HighThroughputDispatch const& a, HighThroughputBlock& state) {
  int const L = a.local_experts;
  int const blocks = static_cast<int>(gridDim.x);
  int const warp = static_cast<int>(threadIdx.x) / 32;
  std::int32_t const* const summary = comm::detail::own<std::int32_t>(a.window, a.at.summary[a.parity.routing]);
  if (threadIdx.x == 0) {
    state.num_rows = summary[0];
  }
#pragma unroll 1
  for (int le = static_cast<int>(blockIdx.x) + blocks * warp; le < L; le += blocks * (static_cast<int>(blockDim.x) / 32)) {
    int const end = summary[2 + L + le] + summary[2 + le];
    fill_gap(a, end, (end + a.alignment - 1) / a.alignment * a.alignment);
  }
}

/// With column blocks, before the row positions: numbers the dispatch among those of its parity, by the combines that this parity has had,
/// which is equal on all ranks. A cached dispatch sends rows without the counts of the other ranks, so it waits until their experts of the
/// last combine have ended: that combine may have ended here when their rows were complete.
__device__ inline void begin_column_round(HighThroughputDispatch const& a, HighThroughputBlock& state) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && tid == 0) {
    *own<std::uint32_t>(w, a.at.round[a.parity.rows]) = *own<std::uint32_t>(w, a.at.finished[a.parity.rows]) + 1;
  }
  if (a.cached) {
    if (tid < w.size && !wait_round(w, own<std::uint32_t>(w, a.at.ready) + tid, own<std::uint32_t>(w, a.at.combined)[blockIdx.x],
                                    comm::ExchangePhase::combine_rows, tid)) {
      state.failed = 1;
    }
    __syncthreads();
  }
}

/// kColumns: the layout has column blocks.
template <bool kFp8, bool kColumns>
__global__ void __launch_bounds__(32 * kHighThroughputWarps, 1) high_throughput_dispatch(HighThroughputDispatch const __grid_constant__ a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ std::uint64_t loaded[kHighThroughputWarps];
  __shared__ std::uint64_t positions_known;
  __shared__ HighThroughputBlock state;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const threads = static_cast<int>(blockDim.x);
  int const warp = tid / 32;
  int const warps = threads / 32;
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  int const N = a.num_experts + w.size;

  // Before the dependency wait, touch shared memory only.
  int const planners = high_throughput_planners(N, warps);
  if (tid == 0) {
    state = {};
    ptx::barrier_init(&positions_known, 32 * planners);
  }
  if (tid % 32 == 0) {
    ptx::barrier_init(&loaded[warp], 1);
    ptx::fence_shared_to_bulk();
  }
#pragma unroll 1
  for (int i = tid; i < planners * N; i += threads) {
    reinterpret_cast<int*>(shared)[i] = 0;
  }
  __syncthreads();
  begin_dependent_kernel();
  if constexpr (kColumns) {
    begin_column_round(a, state);
  }
  std::uint32_t const round = own<std::uint32_t>(w, a.at.sent)[block] + 1;
  int const M = a.in.tokens_device != nullptr ? min(*a.in.tokens_device, a.in.tokens) : a.in.tokens;
  int const t_first = first_token(M, block, blocks);
  int const t_last = first_token(M, block + 1, blocks);
  int const row_shared = high_throughput_row_shared(a.hidden, kFp8);
  unsigned char* const row =
      shared +
      (warp < planners ? warp * row_shared : high_throughput_planned_shared(N, planners, row_shared) + (warp - planners) * row_shared);

  // Planners: the row positions of all tokens. The other warps continue with their first rows.
  if (a.cached) {
    reuse_positions(a, state);
  } else if (warp < planners) {
    high_throughput_positions(a, state, HighThroughputPlan(a, shared, round, M, planners));
  }
  if (warp < planners) {
    ptx::arrive(&positions_known);
  }

  if (a.counts_arrivals) {
    clear_arrivals(a);
  }
  HighThroughputTickets tickets(own<std::uint64_t>(w, a.at.tickets), round, M);
  bool const shares = M > blocks * warps;
  bool const known = a.cached || warp < planners || t_first + warp >= t_last;
  if (known) {
    ptx::barrier_wait(&positions_known, 0);
    if (tid == 0 && shares) {
      tickets.open_range(t_first + warps);
    }
    ptx::fence_shared_to_bulk();  // the rows overwrite the tables
  }
  bool sends = !known || (state.failed == 0 && state.overflown == 0);
  if (sends) {
    sends = send_tokens<kFp8>(a, state, tickets, {row, &loaded[warp], &positions_known, t_first + warp, t_last, shares, known});
  }

  if (sends) {
    publish_and_receive(a, state, round);
  } else if (state.overflown != 0) {
    clear_ids(a, 0);
  }
  __syncthreads();
  if (tid == 0) {
#pragma unroll 1
    for (int b = block; b < kMaxExchangeBlocks; b += blocks) {
      own<std::uint32_t>(w, a.at.sent)[b] = round;
    }
  }
}

}  // namespace moe::detail
