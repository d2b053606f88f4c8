// SPDX-License-Identifier: Apache-2.0
// backends/window/device/two_sided/kernels.cuh: the kernels of TwoSided: a plan (lists and counts), rows through bounded queues, the sum of
// what returns. Spec 04 §11.
//
// A queue belongs to one warp at the sender and one warp at the receiver. The warps of half of the blocks send, those of the other half
// receive; warp v of either half serves the peer at distance 1 + v % R and the queue v / R, so that a sender always waits for a warp that
// is there. The same kernel takes rows to the experts and back.
#pragma once

#include "moe/backends/window/device/common/peer_rows.cuh"
#include "moe/backends/window/device/two_sided/exchange.hpp"

namespace moe::detail {

/// The parts of a summary.
struct TwoSidedSummary {
  std::int32_t* rows;        ///< received
  std::int32_t* rows_for;    ///< [R] sent to each rank
  std::int32_t* rows_from;   ///< [R] received from each rank
  std::int32_t* first_from;  ///< [R] where they begin
  std::int32_t* first_back;  ///< [R] where the outputs of a rank's rows begin when they return
  MOE_HD TwoSidedSummary(std::int32_t* at, int ranks)
      : rows(at), rows_for(at + 1), rows_from(rows_for + ranks), first_from(rows_from + ranks), first_back(first_from + ranks) {}
};

struct TwoSidedPlan {
  comm::WindowView window;
  TwoSidedLayout at;
  PeerTokens tokens;
  std::uint32_t tag = 0;
  std::uint32_t sent_tag = 0;  ///< tag, or refused_tag(tag)
  int max_tokens = 0, topk = 0, local_experts = 0;
  int parity = 0;
};

/// One block: which tokens go to which rank, in token order, and how many rows come from each rank.
static __global__ void __launch_bounds__(kPeerThreads, 1) two_sided_plan(TwoSidedPlan const __grid_constant__ a) {
  using namespace comm::detail;
  constexpr int kWarps = kPeerThreads / 32;
  __shared__ int ahead[32][kWarps];  // tokens of earlier warps that go to a rank
  __shared__ int total[32];
  __shared__ int from[32];
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const warp = tid / 32;
  int const R = w.size;

  begin_dependent_kernel();
  std::uint32_t const round = next_round(w, a.at.planned);
  int const M = a.tokens.count();
  std::int32_t* const send_tokens = own<std::int32_t>(w, a.at.send_tokens[a.parity]);
  std::int32_t* const send_places = own<std::int32_t>(w, a.at.send_places[a.parity]);
  if (tid < 32) {
    total[tid] = 0;
    from[tid] = 0;
  }
  __syncthreads();
#pragma unroll 1
  for (int t0 = 0; t0 < M; t0 += kPeerThreads) {
    int const t = t0 + tid;
    std::uint32_t ranks = 0;
#pragma unroll 1
    for (int j0 = 0; j0 < a.topk; j0 += 8) {
      int id[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {  // all asked for before the first is looked at
        id[j] = t < M && j0 + j < a.topk ? a.tokens.ids[t * a.topk + j0 + j] : -1;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        int const e = a.tokens.place_of(id[j]);
        ranks |= e >= 0 ? 1U << (e / a.local_experts) : 0U;
      }
    }
#pragma unroll 1
    for (int r = 0; r < R; ++r) {
      unsigned const with = __ballot_sync(0xffffffffU, ((ranks >> r) & 1U) != 0);
      if (lane == 0) {
        ahead[r][warp] = __popc(with);
      }
    }
    __syncthreads();
    if (tid < R) {
      int sum = total[tid];
#pragma unroll
      for (int v = 0; v < kWarps; ++v) {
        int const n = ahead[tid][v];
        ahead[tid][v] = sum;
        sum += n;
      }
      total[tid] = sum;
    }
    __syncthreads();
#pragma unroll 1
    for (int r = 0; r < R; ++r) {
      bool const there = ((ranks >> r) & 1U) != 0;
      unsigned const with = __ballot_sync(0xffffffffU, there);
      int const place = ahead[r][warp] + __popc(with & ((1U << lane) - 1U));
      if (t < M) {
        send_places[t * R + r] = there ? place : -1;
        if (there) {
          send_tokens[r * a.max_tokens + place] = t;
        }
      }
    }
    __syncthreads();
  }
  if (tid < R) {  // a rank without rows may be a plan ahead: its words must not fall on those of this one, whatever the call's parity
    ptx::store_relaxed_system(at<std::uint64_t>(w, tid, a.at.counts[round % 2]) + w.rank,
                              comm::count_word(round, a.sent_tag, static_cast<std::uint32_t>(total[tid])));
    from[tid] = sum_counts(w, own<std::uint64_t>(w, a.at.counts[round % 2]), 1, tid, tid + 1, round, a.tag);
  }
  __syncthreads();
  if (tid == 0) {
    TwoSidedSummary const summary(own<std::int32_t>(w, a.at.summary[a.parity]), R);
    int first_from = 0;
    int first_back = 0;
    bool over = false;  // then no row moves: the queues of a rank that disagrees may lie elsewhere
#pragma unroll 1
    for (int r = 0; r < R; ++r) {
      over = over || from[r] < 0;
    }
#pragma unroll 1
    for (int r = 0; r < R; ++r) {
      summary.rows_for[r] = over ? 0 : total[r];
      summary.rows_from[r] = over ? 0 : from[r];
      summary.first_from[r] = first_from;
      summary.first_back[r] = first_back;
      first_from += summary.rows_from[r];
      first_back += total[r];
    }
    *summary.rows = first_from;
    *own<std::uint32_t>(w, a.at.round_of[a.parity]) = round;
    end_round(w, a.at.planned, round);
  }
}

struct TwoSidedMove {
  comm::WindowView window;
  TwoSidedLayout at;
  TwoSidedQueues queues;
  PeerTokens tokens;
  ScaleRule rule;
  int max_tokens = 0, hidden = 0, topk = 0, local_experts = 0, scale_stride = 0;
  int parity = 0;
  bool back = false;  ///< outputs to where the rows came from; else rows to the experts
};

/// The entries that carry records [first, last): `each` to an entry.
__device__ inline std::uint32_t entries_of(int first, int last, int each) {
  return last > first ? static_cast<std::uint32_t>((last - first + each - 1) / each) : 0U;
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
  int const K = a.topk;
  int const Q = a.at.queues;
  bool const sends = static_cast<int>(blockIdx.x) < a.at.send_blocks;
  int const v = (static_cast<int>(blockIdx.x) - (sends ? 0 : a.at.send_blocks)) * a.at.warps + warp;

  begin_dependent_kernel();
  TwoSidedSummary const summary(own<std::int32_t>(w, a.at.summary[a.parity]), R);
  unsigned char* const record = shared + warp * a.at.stage_bytes();
  int const record_bytes = a.back ? a.at.returned_bytes : a.at.record_bytes;
  int const each = a.queues.entry_bytes / record_bytes;
  auto const depth = static_cast<std::uint32_t>(a.queues.depth);
  auto const phase = a.back ? comm::ExchangePhase::combine_rows : comm::ExchangePhase::dispatch_rows;
  std::int32_t const* const outgoing = a.back ? summary.rows_from : summary.rows_for;
  std::int32_t const* const incoming = a.back ? summary.rows_for : summary.rows_from;
  if (lane == 0) {
    ptx::barrier_init(&loaded[warp], 1);
    ptx::fence_shared_to_bulk();
  }
  __syncwarp();
  std::uint32_t load_phase = 0;
  auto load = [&](void const* from, int bytes) {  // of one record, after the last one has left
    ptx::bulk_wait_read();
    __syncwarp();
    if (lane == 0) {
      ptx::barrier_expect(&loaded[warp], bytes);
      ptx::bulk_load(record, from, bytes, &loaded[warp]);
    }
    __syncwarp();
    ptx::barrier_wait(&loaded[warp], load_phase);
    load_phase ^= 1;
  };
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
          if (a.back) {
            load(own<char>(w, a.at.outputs[a.parity]) + static_cast<std::size_t>(summary.first_from[peer] + i) * record_bytes,
                 record_bytes);
          } else {
            int const t = own<std::int32_t>(w, a.at.send_tokens[a.parity])[peer * a.max_tokens + i];
            __nv_bfloat16 const* const x = a.tokens.x + t * a.tokens.x_stride;
            if constexpr (kFp8) {
              quantize_row(x, a.hidden, a.rule, lane, record, reinterpret_cast<float*>(record + a.at.record_scales));
            } else {
              load(x, 2 * a.hidden);
            }
            if (lane < K) {
              int const e = a.tokens.place(t * K + lane);
              bool const there = e >= 0 && e / a.local_experts == peer;
              reinterpret_cast<std::int32_t*>(record + a.at.record_ids)[lane] = there ? e - peer * a.local_experts : -1;
              reinterpret_cast<float*>(record + a.at.record_ids)[K + lane] = there ? a.tokens.weights[t * K + lane] : 0.0F;
            }
            ptx::fence_shared_to_bulk();
            __syncwarp();
          }
          if (lane == 0) {
            ptx::bulk_store(to + static_cast<std::size_t>(i - i0) * record_bytes, record, record_bytes);
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
          load(from + static_cast<std::size_t>(i - i0) * record_bytes, record_bytes);
          if (a.back) {
            if (lane == 0) {
              ptx::bulk_store(own<char>(w, a.at.returned) + static_cast<std::size_t>(summary.first_back[peer] + i) * record_bytes, record,
                              record_bytes);
              ptx::bulk_commit();
            }
          } else {
            auto const row = static_cast<std::size_t>(summary.first_from[peer] + i);
            if (lane == 0) {
              ptx::bulk_store(own<char>(w, a.at.rows[a.parity]) + row * a.at.record_scales, record, a.at.record_scales);
              if constexpr (kFp8) {
                ptx::bulk_store(own<char>(w, a.at.scales[a.parity]) + row * a.scale_stride * 4, record + a.at.record_scales,
                                a.at.record_ids - a.at.record_scales);
              }
              ptx::bulk_commit();
            }
            if (lane < K) {
              own<std::int32_t>(w, a.at.ids[a.parity])[row * K + lane] =
                  reinterpret_cast<std::int32_t const*>(record + a.at.record_ids)[lane];
              own<float>(w, a.at.weights[a.parity])[row * K + lane] = reinterpret_cast<float const*>(record + a.at.record_ids)[K + lane];
            }
          }
          __syncwarp();
        }
        if (lane == 0) {  // the records were loaded: the sender may write the entry again
          publish(at<std::uint32_t>(w, peer, a.at.head) + queue * R + me, number + 1);
        }
      }
    }
    if (lane == 0) {  // a failed wait leaves the numbers as consistent as a good one
      *mine = begin + entries_of(first, last, each);
    }
  }
  finish_stores();
}

struct TwoSidedSum {
  comm::WindowView window;
  TwoSidedLayout at;
  PeerTokens tokens;
  int hidden = 0;
  int parity = 0;
  __nv_bfloat16* out = nullptr;  ///< [M][out_stride]
  std::int64_t out_stride = 0;
};

/// Adds what came back for each token, ranks ascending.
static __global__ void __launch_bounds__(kPeerThreads, 1) two_sided_sum(TwoSidedSum const __grid_constant__ a) {
  using namespace comm::detail;
  __shared__ Terms terms[kQuads];
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const quad = tid / kQuadThreads;
  int const R = w.size;

  begin_dependent_kernel();
  int const M = a.tokens.count();
  TwoSidedSummary const summary(own<std::int32_t>(w, a.at.summary[a.parity]), R);
  bool const watches = blockIdx.x == 0 && tid < R;
  std::uint32_t const round = watches ? *own<std::uint32_t>(w, a.at.round_of[a.parity]) : 0;
  PeerRefusals refusals;
  if (watches) {
    refusals.load(w, tid);
  }
#pragma unroll 1
  for (int t = static_cast<int>(blockIdx.x) + static_cast<int>(gridDim.x) * quad; t < M; t += static_cast<int>(gridDim.x) * kQuads) {
    if (tid % kQuadThreads < 32) {
      int const place = lane < R ? own<std::int32_t>(w, a.at.send_places[a.parity])[t * R + lane] : -1;
      unsigned const used = __ballot_sync(0xffffffffU, place >= 0);
      if (place >= 0) {
        int const i = __popc(used & ((1U << lane) - 1U));
        terms[quad].row[i] = own<char>(w, a.at.returned) + static_cast<std::size_t>(summary.first_back[lane] + place) * a.hidden * 2;
        terms[quad].weight[i] = 1.0F;
      }
      if (lane == 0) {
        terms[quad].count = __popc(used);
      }
    }
    sync_quad(quad);
    sum_terms(terms[quad], 0, a.hidden, a.out + t * a.out_stride);
    sync_quad(quad);
  }
  if (watches) {
    refusals.report_combine(w, tid, round);
  }
}

/// Whether a received row exists.
struct TwoSidedRowIsUsed {
  std::int32_t const* num_rows;
  __device__ bool operator()(int row) const { return row < *num_rows; }
};

inline TwoSidedCalls::TwoSidedCalls(comm::WindowView const& window, PeerShape const& shape, TwoSidedQueues const& queues,
                                    PeerOptions const& options)
    : PeerCalls(window, shape, TwoSidedLayout(shape, queues), options), queues_(queues) {
  shape.check();
  expect_peer_device(shape);
  if (queues.depth < 1 || (queues.depth & (queues.depth - 1)) != 0) {
    throw Error(ErrorCode::config, text("queue_depth: ", queues.depth, " must be a power of two"));
  }
  if (int const record = std::max(at_.record_bytes, at_.returned_bytes); queues.entry_bytes < record || queues.entry_bytes % 128 != 0) {
    throw Error(ErrorCode::config,
                text("queue_entry_bytes: ", queues.entry_bytes, " must be a multiple of 128 of at least one record, ", record, " bytes"));
  }
  if (at_.stage_bytes() > 220 * 1024) {
    throw Error(ErrorCode::unsupported, text(shape.name, ": a record of ", at_.stage_bytes(), " bytes does not fit shared memory"));
  }
  int const shared = at_.warps * at_.stage_bytes();
  for (auto* kernel : {&two_sided_move<true>, &two_sided_move<false>}) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
    expect_resident(kernel, shape.name, 2 * at_.send_blocks, 32 * at_.warps, static_cast<std::size_t>(shared));
  }
}

inline void TwoSidedCalls::dispatch(ExchangeTokens const& in, int parity, cudaStream_t stream, std::uint32_t refused) const {
  if (refused != 0) {
    enqueue_refusal(window_, at_.planned, 1, kAllRanks, refused, stream);
  }
  TwoSidedPlan a;
  a.window = window_;
  a.at = at_;
  a.tokens = peer_tokens(in, options_);
  a.tag = shape_.tag().add(static_cast<std::uint64_t>(queues_.depth)).add(static_cast<std::uint64_t>(queues_.entry_bytes)).value();
  a.sent_tag = refused != 0 ? comm::refused_tag(a.tag) : a.tag;
  a.max_tokens = shape_.max_tokens;
  a.topk = shape_.topk;
  a.local_experts = shape_.local_experts();
  a.parity = parity;
  launch_exchange(&two_sided_plan, "two_sided_plan", 1, kPeerThreads, 0, options_.programmatic, stream, a);
  move(in, false, parity, stream);
}

inline void TwoSidedCalls::move(ExchangeTokens const& in, bool back, int parity, cudaStream_t stream) const {
  TwoSidedMove a;
  a.window = window_;
  a.at = at_;
  a.queues = queues_;
  a.tokens = peer_tokens(in, options_);
  a.rule = options_.rule;
  a.max_tokens = shape_.max_tokens;
  a.hidden = shape_.hidden;
  a.topk = shape_.topk;
  a.local_experts = shape_.local_experts();
  a.scale_stride = shape_.scale_stride();
  a.parity = parity;
  a.back = back;
  launch_exchange(shape_.fp8 ? &two_sided_move<true> : &two_sided_move<false>, "two_sided_move", 2 * at_.send_blocks, 32 * at_.warps,
                  static_cast<std::size_t>(at_.warps) * static_cast<std::size_t>(at_.stage_bytes()), options_.programmatic, stream, a);
}

inline void TwoSidedCalls::combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int parity, cudaStream_t stream,
                                   std::uint32_t refused) const {
  if (refused != 0) {
    enqueue_refusal(window_, at_.round_of[parity], 0, kAllRanks, refused, stream);
  }
  move(in, true, parity, stream);
  TwoSidedSum a;
  a.window = window_;
  a.at = at_;
  a.tokens = peer_tokens(in, options_);
  a.hidden = shape_.hidden;
  a.parity = parity;
  a.out = out;
  a.out_stride = out_stride;
  launch_exchange(&two_sided_sum, "two_sided_sum", std::clamp((in.tokens + kQuads - 1) / kQuads, 1, 512), kPeerThreads, 0,
                  options_.programmatic, stream, a);
}

inline void TwoSidedCalls::round(float const* y, int parity, cudaStream_t stream) const {
  round_peer_rows<<<1024, 256, 0, stream>>>(y, TwoSidedRowIsUsed{own<std::int32_t>(at_.summary[parity])}, shape_.rows(), shape_.hidden,
                                            outputs(parity));
  check_launch("round_peer_rows");
}

inline void TwoSidedCalls::abandon(cudaStream_t stream) const {
  abandon_exchange<<<1, 32, 0, stream>>>(window_);
  check_launch("abandon_exchange");
}

}  // namespace moe::detail
