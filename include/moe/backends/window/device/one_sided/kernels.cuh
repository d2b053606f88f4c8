// SPDX-License-Identifier: Apache-2.0
// backends/window/device/one_sided/kernels.cuh: the kernels of OneSided: rows pushed to places that the sender chooses, outputs pulled from
// there. Spec 04 §10.
//
// A source's rows have a part of their own at every rank, so a row needs no count but the source's own: the first row leaves at once. Which
// row of the part a token gets is a race; which outputs it adds, and in which order, is not.
#pragma once

#include "moe/backends/window/device/common/peer_rows.cuh"
#include "moe/backends/window/device/one_sided/exchange.hpp"

namespace moe::detail {

struct OneSidedDispatch {
  comm::WindowView window;
  OneSidedLayout at;
  PeerTokens tokens;
  ScaleRule rule;
  std::uint64_t active = 0;  ///< ranks that take part
  std::uint32_t tag = 0;
  std::uint32_t sent_tag = 0;  ///< tag, or refused_tag(tag)
  int runtime_max = 0, hidden = 0, topk = 0, local_experts = 0, scale_stride = 0;
  int parity = 0;
};

/// This lane's choice: the rank that it goes to, or -1, and whether it is the token's first for that rank.
struct RankChoice {
  int expert;  ///< rank * L + local
  int rank;
  bool first;
};
__device__ inline RankChoice rank_choice(PeerTokens const& in, int t, int lane, int topk, int local_experts, std::uint64_t active) {
  int const e = lane < topk ? in.place(t * topk + lane) : -1;
  int const rank = e >= 0 && ((active >> (e / local_experts)) & 1U) != 0 ? e / local_experts : -1;
  unsigned const same = __match_any_sync(0xffffffffU, rank);
  return {e, rank, rank >= 0 && (same & ((1U << lane) - 1U)) == 0};
}

template <bool kFp8>
__global__ void __launch_bounds__(kPeerThreads, 1) one_sided_dispatch(OneSidedDispatch const __grid_constant__ a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ std::uint64_t loaded[kPeerThreads / 32];
  __shared__ int slot_of[kQuads][32];
  __shared__ int count;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const warp = tid / 32;
  int const quad = tid / kQuadThreads;
  int const part = warp % (kQuadThreads / 32);
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  int const R = w.size;
  int const me = w.rank;
  int const K = a.topk;
  int const L = a.local_experts;

  begin_dependent_kernel();
  std::uint32_t const round = next_round(w, a.at.sent);
  int const M = a.tokens.count();
  std::uint32_t* const counters = own<std::uint32_t>(w, a.at.send_counters[a.parity]);
  int const values = part_values(a.hidden, kQuadThreads / 32);
  int const from = part * values;
  WarpStage<kFp8> stage(shared + warp * staged_bytes(kFp8, values), &loaded[warp], lane);

#pragma unroll 1
  for (int t = block + blocks * quad; t < M; t += blocks * kQuads) {  // neighbouring tokens on different blocks
    RankChoice const choice = rank_choice(a.tokens, t, lane, K, L, a.active);
    if (part == 0) {
      int const slot = choice.first ? static_cast<int>(atomicAdd(&counters[choice.rank], 1U)) : -1;
      slot_of[quad][lane] = slot;
      if (lane < K) {
        own<std::int32_t>(w, a.at.send_index[a.parity])[t * K + lane] = slot;
      }
    }
    stage.fill(a.tokens.x + t * a.tokens.x_stride + from, max(0, min(values, a.hidden - from)), a.rule);
    sync_quad(quad);
    int const slot = slot_of[quad][lane];
    std::size_t const row = static_cast<std::size_t>(me) * a.runtime_max + (slot >= 0 ? slot : 0);
    char* const to = slot >= 0 ? w.peer[choice.rank] : nullptr;
    stage.store(to == nullptr ? nullptr : to + a.at.rows[a.parity] + (row * a.hidden + from) * (kFp8 ? 1 : 2),
                to == nullptr ? nullptr : to + a.at.scales[a.parity] + (row * a.scale_stride + from / 128) * 4);
    // Local ids and weights: a quarter of the destinations each.
    float const weight = lane < K ? a.tokens.weights[t * K + lane] : 0.0F;
    int i = 0;
#pragma unroll 1
    for (unsigned left = __ballot_sync(0xffffffffU, slot >= 0); left != 0; left &= left - 1, ++i) {
      if (i % (kQuadThreads / 32) != part) {
        continue;
      }
      int const from_lane = __ffs(left) - 1;
      int const r = __shfl_sync(0xffffffffU, choice.rank, from_lane);
      std::size_t const index =
          (static_cast<std::size_t>(me) * a.runtime_max + __shfl_sync(0xffffffffU, slot, from_lane)) * static_cast<std::size_t>(K) + lane;
      if (lane < K) {
        at<std::int32_t>(w, r, a.at.ids[a.parity])[index] = choice.rank == r ? choice.expert - r * L : -1;
        at<float>(w, r, a.at.weights[a.parity])[index] = choice.rank == r ? weight : 0.0F;
      }
    }
    sync_quad(quad);  // slot_of is free again
  }
  finish_stores();
  if (is_last_block(own<std::uint32_t>(w, a.at.arrived))) {
    if (tid < R) {
      std::uint32_t const n = ptx::load_relaxed_system(&counters[tid]);
      counters[tid] = 0;
      if ((a.active >> tid) & 1U) {
        ptx::fence_system();
        ptx::store_relaxed_system(at<std::uint64_t>(w, tid, a.at.counts[a.parity]) + me, comm::count_word(round, a.sent_tag, n));
      }
    }
  }

  // Sources are dealt to the blocks; a block takes its part of the rows that its source did not use.
#pragma unroll 1
  for (int source = block % R; source < R; source += blocks) {
    __syncthreads();
    if (tid == 0) {
      bool const alive = ((a.active >> source) & 1U) != 0;
      count = alive ? sum_counts(w, own<std::uint64_t>(w, a.at.counts[a.parity]), 1, source, source + 1, round, a.tag) : 0;
      ptx::fence_system();  // acquires what came with the word
    }
    __syncthreads();
    int const share = block / R;
    int const shares = source < blocks ? (blocks - 1 - source) / R + 1 : 1;
    int const first = max(count, 0) * K;
    std::int32_t* const ids = own<std::int32_t>(w, a.at.ids[a.parity]) + static_cast<std::size_t>(source) * a.runtime_max * K;
#pragma unroll 1
    for (int i = first + share * kPeerThreads + tid; i < a.runtime_max * K; i += shares * kPeerThreads) {
      ids[i] = -1;
    }
  }
  __syncthreads();
  if (tid == 0) {
    end_round(w, a.at.sent, round);
  }
}

struct OneSidedCombine {
  comm::WindowView window;
  OneSidedLayout at;
  PeerTokens tokens;
  std::uint64_t active = 0;
  int runtime_max = 0, hidden = 0, topk = 0, local_experts = 0;
  int parity = 0;
  __nv_bfloat16* out = nullptr;  ///< [M][out_stride]
  std::int64_t out_stride = 0;
};

static __global__ void __launch_bounds__(kPeerThreads, 1) one_sided_combine(OneSidedCombine const __grid_constant__ a) {
  using namespace comm::detail;
  __shared__ Terms terms[kQuads];
  __shared__ int failed;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const quad = tid / kQuadThreads;
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);

  begin_dependent_kernel();
  std::uint32_t const round = next_round(w, a.at.combined);
  if (tid == 0) {
    failed = 0;
  }
  __syncthreads();
  std::uint32_t refusal = 0;
  if (tid < w.size && ((a.active >> tid) & 1U) != 0) {
    if (block == 0) {  // the experts' kernel is over: its rows may be read
      publish(at<std::uint32_t>(w, tid, a.at.ready) + w.rank, round);
    }
    if (!wait_round(w, own<std::uint32_t>(w, a.at.ready) + tid, round, comm::ExchangePhase::combine_rows, tid)) {
      failed = 1;
    } else if (block == 0) {
      refusal = load_refusal(w, tid, round);
    }
  }
  __syncthreads();
  int const M = failed != 0 ? 0 : a.tokens.count();
#pragma unroll 1
  for (int t = block + blocks * quad; t < M; t += blocks * kQuads) {
    if (tid % kQuadThreads < 32) {
      RankChoice const choice = rank_choice(a.tokens, t, lane, a.topk, a.local_experts, a.active);
      unsigned const used = __ballot_sync(0xffffffffU, choice.first);
      if (choice.first) {
        int const slot = own<std::int32_t>(w, a.at.send_index[a.parity])[t * a.topk + lane];
        std::size_t const row = static_cast<std::size_t>(w.rank) * a.runtime_max + slot;
        int const i = __popc(used & ((1U << lane) - 1U));
        terms[quad].row[i] = w.peer[choice.rank] + a.at.outputs[a.parity] + row * a.hidden * 2;
        terms[quad].weight[i] = 1.0F;
      }
      if (lane == 0) {
        terms[quad].count = __popc(used);
      }
    }
    sync_quad(quad);
    sum_terms(terms[quad], t, a.hidden, a.out + t * a.out_stride);
    sync_quad(quad);
  }
  report_refusal(w, refusal, comm::ExchangePhase::combine_rows, tid, round);
  __syncthreads();
  if (tid == 0) {
    end_round(w, a.at.combined, round);
  }
}

/// Whether a row of the workspace was sent in the last dispatch of a parity.
struct OneSidedRowIsUsed {
  std::uint64_t const* counts;  ///< [rank]
  int runtime_max;
  __device__ bool operator()(int row) const { return row % runtime_max < static_cast<int>(comm::word_count(counts[row / runtime_max])); }
};

inline OneSidedCalls::OneSidedCalls(comm::WindowView const& window, PeerShape const& shape, PeerOptions const& options)
    : PeerCalls(window, shape, OneSidedLayout(shape), options), active_((std::uint64_t{1} << shape.ranks) - 1) {
  shape.check();
  expect_peer_device(shape);
  int const shared = quad_shared(shape);
  for (auto* kernel : {&one_sided_dispatch<true>, &one_sided_dispatch<false>}) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
    expect_resident(kernel, shape.name, shape.blocks, kPeerThreads, static_cast<std::size_t>(shared));
  }
  expect_resident(&one_sided_combine, shape.name, shape.blocks, kPeerThreads, 0);
}

inline void OneSidedCalls::set_active_ranks(std::uint64_t mask) {
  if (((mask >> window_.rank) & 1U) == 0) {
    throw Error(ErrorCode::argument, text("active ranks: the mask ", mask, " leaves out rank ", window_.rank, " itself"));
  }
  active_ = mask & ((std::uint64_t{1} << shape_.ranks) - 1);
}

inline void OneSidedCalls::dispatch(ExchangeTokens const& in, int runtime_max, int parity, cudaStream_t stream,
                                    std::uint32_t refused) const {
  if (in.tokens > runtime_max || runtime_max > shape_.max_tokens) {
    throw Error(ErrorCode::capacity,
                text("one_sided: ", in.tokens, " tokens, runtime maximum ", runtime_max, ", max_tokens_per_rank ", shape_.max_tokens));
  }
  if (refused != 0) {
    enqueue_refusal(window_, at_.sent, 1, active_, refused, stream);
  }
  OneSidedDispatch a;
  a.window = window_;
  a.at = at_;
  a.tokens = peer_tokens(in, options_);
  a.rule = options_.rule;
  a.active = active_;
  a.tag = shape_.tag().add(static_cast<std::uint64_t>(runtime_max)).value();
  a.sent_tag = refused != 0 ? comm::refused_tag(a.tag) : a.tag;
  a.runtime_max = runtime_max;
  a.hidden = shape_.hidden;
  a.topk = shape_.topk;
  a.local_experts = shape_.local_experts();
  a.scale_stride = shape_.scale_stride();
  a.parity = parity;
  launch_exchange(shape_.fp8 ? &one_sided_dispatch<true> : &one_sided_dispatch<false>, "one_sided_dispatch", shape_.blocks, kPeerThreads,
                  static_cast<std::size_t>(quad_shared(shape_)), options_.programmatic, stream, a);
}

inline void OneSidedCalls::combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int runtime_max, int parity,
                                   cudaStream_t stream, std::uint32_t refused) const {
  if (refused != 0) {
    enqueue_refusal(window_, at_.combined, 1, active_, refused, stream);
  }
  OneSidedCombine a;
  a.window = window_;
  a.at = at_;
  a.tokens = peer_tokens(in, options_);
  a.active = active_;
  a.runtime_max = runtime_max;
  a.hidden = shape_.hidden;
  a.topk = shape_.topk;
  a.local_experts = shape_.local_experts();
  a.parity = parity;
  a.out = out;
  a.out_stride = out_stride;
  launch_exchange(&one_sided_combine, "one_sided_combine", shape_.blocks, kPeerThreads, 0, options_.programmatic, stream, a);
}

inline void OneSidedCalls::round(float const* y, int runtime_max, int parity, cudaStream_t stream) const {
  round_peer_rows<<<1024, 256, 0, stream>>>(y, OneSidedRowIsUsed{own<std::uint64_t>(at_.counts[parity]), runtime_max},
                                            shape_.ranks * runtime_max, shape_.hidden, outputs(parity));
  check_launch("round_peer_rows");
}

inline void OneSidedCalls::abandon(cudaStream_t stream) const {
  abandon_exchange<<<1, 32, 0, stream>>>(window_);
  check_launch("abandon_exchange");
}

}  // namespace moe::detail
