// SPDX-License-Identifier: Apache-2.0
// backends/window/device/two_sided/move.cuh: rows through bounded queues, to the experts and back. docs/semantics/exchange.md §11.
//
// A queue has one sending warp and one receiving warp. The warps of half of the blocks send, those of the other half receive. Warp v of
// either half serves the peer at distance 1 + v % R and the queue v / R, so every sender has a receiver that is resident. The same kernel
// takes rows to the experts and back.
#pragma once

#include "moe/backends/window/device/two_sided/plan.cuh"

namespace moe::detail {

struct TwoSidedMove : PeerParams<TwoSidedLayout> {
  TwoSidedQueues queues;
  bool back = false;  ///< outputs to the rows' sources; else rows to the experts
};

/// The number of entries for the records [first, last), `each` records per entry.
__device__ inline std::uint32_t entries_of(int first, int last, int each) {
  return last > first ? static_cast<std::uint32_t>((last - first + each - 1) / each) : 0U;
}

/// The one record that a warp holds in shared memory. All lanes call all functions.
class TwoSidedStage {
 public:
  __device__ TwoSidedStage(unsigned char* shared, std::uint64_t* loaded) : record_(shared), loaded_(loaded) {
    if (lane() == 0) {
      ptx::barrier_init(loaded, 1);
      ptx::fence_shared_to_bulk();
    }
    __syncwarp();
  }
  __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ unsigned char* record() const { return record_; }
  /// Loads `bytes` from there, once the copy engine has read the previous record.
  __device__ void load(void const* from, int bytes) {
    ptx::bulk_wait_read();
    __syncwarp();
    if (lane() == 0) {
      ptx::barrier_expect(loaded_, bytes);
      ptx::bulk_load(record_, from, bytes, loaded_);
    }
    __syncwarp();
    ptx::barrier_wait(loaded_, phase_);
    phase_ ^= 1;
  }

 private:
  unsigned char* record_;
  std::uint64_t* loaded_;
  std::uint32_t phase_ = 0;
};

/// Sending warp: loads record i for `peer` into shared memory: a quantised token with ids and weights, or a returned output.
template <bool kFp8>
__device__ inline void stage_record(TwoSidedMove const& a, TwoSidedSummary const& summary, TwoSidedStage& stage, int peer, int i) {
  comm::WindowView const& w = a.window;
  int const lane = stage.lane();
  if (a.back) {
    int const bytes = a.at.returned_bytes;
    stage.load(comm::detail::own<char>(w, a.at.outputs[a.parity]) + static_cast<std::size_t>(summary.first_from[peer] + i) * bytes, bytes);
    return;
  }

  int const t = comm::detail::own<std::int32_t>(w, a.at.send_tokens[a.parity])[peer * a.max_tokens + i];
  __nv_bfloat16 const* const x = a.tokens.x + t * a.tokens.x_stride;
  unsigned char* const record = stage.record();
  if constexpr (kFp8) {
    quantize_row(x, a.hidden, a.rule, lane, record, reinterpret_cast<float*>(record + a.at.record_scales));
  } else {
    stage.load(x, 2 * a.hidden);
  }
  if (lane < a.topk) {
    int const e = a.tokens.place(t * a.topk + lane);
    bool const there = e >= 0 && e / a.local_experts == peer;
    reinterpret_cast<std::int32_t*>(record + a.at.record_ids)[lane] = there ? e - peer * a.local_experts : -1;
    reinterpret_cast<float*>(record + a.at.record_ids)[a.topk + lane] = there ? a.tokens.weights[t * a.topk + lane] : 0.0F;
  }
  ptx::fence_shared_to_bulk();
  __syncwarp();
}

/// Receiving warp: copies the loaded record i of `peer` to its row position for the experts, or for the sums on the way back.
template <bool kFp8>
__device__ inline void keep_record(TwoSidedMove const& a, TwoSidedSummary const& summary, TwoSidedStage const& stage, int peer, int i) {
  using comm::detail::own;
  comm::WindowView const& w = a.window;
  int const lane = stage.lane();
  unsigned char const* const record = stage.record();
  if (a.back) {
    if (lane == 0) {
      int const bytes = a.at.returned_bytes;
      ptx::bulk_store(own<char>(w, a.at.returned) + static_cast<std::size_t>(summary.first_back[peer] + i) * bytes, record, bytes);
      ptx::bulk_commit();
    }
    return;
  }

  auto const row = static_cast<std::size_t>(summary.first_from[peer] + i);
  if (lane == 0) {
    ptx::bulk_store(own<char>(w, a.at.rows[a.parity]) + row * a.at.record_scales, record, a.at.record_scales);
    if constexpr (kFp8) {
      ptx::bulk_store(own<char>(w, a.at.scales[a.parity]) + row * a.scale_stride * 4, record + a.at.record_scales,
                      a.at.record_ids - a.at.record_scales);
    }
    ptx::bulk_commit();
  }
  if (lane < a.topk) {
    own<std::int32_t>(w, a.at.ids[a.parity])[row * a.topk + lane] = reinterpret_cast<std::int32_t const*>(record + a.at.record_ids)[lane];
    own<float>(w, a.at.weights[a.parity])[row * a.topk + lane] = reinterpret_cast<float const*>(record + a.at.record_ids)[a.topk + lane];
  }
}

template <bool kFp8>
__global__ void __launch_bounds__(kPeerThreads, 1) two_sided_move(TwoSidedMove const __grid_constant__ a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ std::uint64_t loaded[kPeerThreads / 32];
  comm::WindowView const& w = a.window;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const warp = static_cast<int>(threadIdx.x) / 32;
  int const R = w.size;
  int const me = w.rank;
  int const Q = a.at.queues;
  bool const sends = static_cast<int>(blockIdx.x) < a.at.send_blocks;
  int const v = (static_cast<int>(blockIdx.x) - (sends ? 0 : a.at.send_blocks)) * a.at.warps + warp;

  begin_dependent_kernel();
  TwoSidedSummary const summary(own<std::int32_t>(w, a.at.summary[a.parity]), R);
  int const record_bytes = a.back ? a.at.returned_bytes : a.at.record_bytes;
  int const each = a.queues.entry_bytes / record_bytes;
  auto const depth = static_cast<std::uint32_t>(a.queues.depth);
  auto const phase = a.back ? comm::ExchangePhase::combine_rows : comm::ExchangePhase::dispatch_rows;
  std::int32_t const* const outgoing = a.back ? summary.rows_from : summary.rows_for;
  std::int32_t const* const incoming = a.back ? summary.rows_for : summary.rows_from;
  TwoSidedStage stage(shared + warp * a.at.stage_bytes(), &loaded[warp]);
  auto entry = [&](int rank, int queue, int source, std::uint32_t n) {
    std::size_t const index = (static_cast<std::size_t>(queue) * R + source) * depth + n % depth;
    return w.peer[rank] + a.at.entries + index * static_cast<std::size_t>(a.queues.entry_bytes);
  };

#pragma unroll 1
  for (int o = v; o < Q * R; o += a.at.send_blocks * a.at.warps) {
    int const queue = o / R;
    int const peer = sends ? (me + 1 + o % R) % R : (me + R - 1 - o % R) % R;
    int const n = (sends ? outgoing : incoming)[peer];
    int const first = static_cast<int>(static_cast<std::int64_t>(n) * queue / Q);
    int const last = static_cast<int>(static_cast<std::int64_t>(n) * (queue + 1) / Q);
    std::uint32_t* const mine = own<std::uint32_t>(w, sends ? a.at.sent_tail : a.at.read_head) + queue * R + peer;
    std::uint32_t const begin = *mine;
    std::uint32_t number = begin;
    bool good = true;
#pragma unroll 1
    for (int i0 = first; i0 < last && good; i0 += each, ++number) {
      int const i1 = min(i0 + each, last);
      // A sender waits until the receiver has read the entry to be overwritten; a receiver waits until the next is written.
      if (lane == 0) {
        std::uint32_t const* const word = own<std::uint32_t>(w, sends ? a.at.head : a.at.tail) + queue * R + peer;
        good = wait_round(w, word, sends ? number + 1 - depth : number + 1, phase, peer);
        ptx::fence_bulk();
      }
      good = __shfl_sync(0xffffffffU, static_cast<int>(good), 0) != 0;
      if (!good) {
        break;
      }

      if (sends) {
        char* const to = entry(peer, queue, me, number);
#pragma unroll 1
        for (int i = i0; i < i1; ++i) {
          stage_record<kFp8>(a, summary, stage, peer, i);
          if (lane == 0) {
            ptx::bulk_store(to + static_cast<std::size_t>(i - i0) * record_bytes, stage.record(), record_bytes);
            ptx::bulk_commit();
          }
        }
        if (lane == 0) {
          finish_stores();
          publish(at<std::uint32_t>(w, peer, a.at.tail) + queue * R + me, number + 1);
        }
      } else {
        char const* const from = entry(me, queue, peer, number);
#pragma unroll 1
        for (int i = i0; i < i1; ++i) {
          stage.load(from + static_cast<std::size_t>(i - i0) * record_bytes, record_bytes);
          keep_record<kFp8>(a, summary, stage, peer, i);
          __syncwarp();
        }
        if (lane == 0) {  // the records were loaded: the sender may overwrite the entry
          publish(at<std::uint32_t>(w, peer, a.at.head) + queue * R + me, number + 1);
        }
      }
    }
    if (lane == 0) {  // also after a failed wait: the counters must stay consistent
      *mine = begin + entries_of(first, last, each);
    }
  }
  finish_stores();
}

}  // namespace moe::detail
