// SPDX-License-Identifier: Apache-2.0
// backends/window/device/pplx/dispatch.cuh: rows by (source, expert), packed by the receiver. docs/semantics/exchange.md §9.
#pragma once

#include "moe/backends/window/device/common/peer_rows.cuh"
#include "moe/backends/window/device/pplx/exchange.hpp"

namespace moe::detail {

struct PplxMove : PeerParams<PplxLayout> {
  PplxGroup group;
  PeerTags tags;
  bool send = true;
  bool receive = true;
  __nv_bfloat16* out = nullptr;  ///< [M][out_stride]; combine only
  std::int64_t out_stride = 0;
};

/// This lane's choice, and the first lane with the same choice.
struct ExpertChoice {
  int expert;  ///< rank * L + local; -1: none
  int first;
};
__device__ inline ExpertChoice expert_choice(PplxMove const& a, int t, int lane) {
  int const e = lane < a.topk ? a.tokens.place(t * a.topk + lane) : -1;
  return {e, __ffs(__match_any_sync(0xffffffffU, e)) - 1};
}

/// Copies `n` 16-byte vectors of this rank's memory by one warp.
__device__ inline void copy_vectors(uint4* to, uint4 const* from, int n, int lane) {
  constexpr int kBatch = 7;
#pragma unroll 1
  for (int u0 = 0; u0 < n; u0 += 32 * kBatch) {
    uint4 v[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int const u = u0 + 32 * i + lane;
      if (u < n) {
        v[i] = comm::detail::load_peer(from + u);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int const u = u0 + 32 * i + lane;
      if (u < n) {
        to[u] = v[i];
      }
    }
  }
}

/// State that the threads of a block share.
struct PplxBlock {
  std::uint64_t loaded[kPeerThreads / 32];  ///< a barrier for each warp's part of a row
  int position_of[kQuads][32];              ///< per choice of the quad's token: its row in this rank's part at the receiver, or -1
  int begin_of[kQuads];                     ///< first row in the batch for the rows that the quad packs
  int count_of[kQuads];                     ///< the number of rows that it packs
};

/// All quads, one token each: rows to the experts' ranks, then the counts by the last block. Ranks of a group share its tokens.
template <bool kFp8>
__device__ inline void send_rows(PplxMove const& a, PplxBlock& block, unsigned char* shared, std::uint32_t round, int tokens) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const warp = tid / 32;
  int const quad = tid / kQuadThreads;
  int const part = warp % (kQuadThreads / 32);
  int const blocks = static_cast<int>(gridDim.x);
  int const me = w.rank;
  int const K = a.topk;
  int const L = a.local_experts;
  int const S = a.at.per_source;
  int const D = a.group.dp_size;
  int const row_bytes = kFp8 ? a.hidden : 2 * a.hidden;
  std::uint32_t* const counters = own<std::uint32_t>(w, a.at.counters[a.parity]);
  int const values = part_values(a.hidden, kQuadThreads / 32);
  int const from = part * values;
  WarpStage<kFp8> stage(shared + warp * staged_bytes(kFp8, values), &block.loaded[warp], lane);
#pragma unroll 1
  for (int t = me % D + D * (static_cast<int>(blockIdx.x) + blocks * quad); t < tokens; t += D * blocks * kQuads) {
    ExpertChoice const choice = expert_choice(a, t, lane);
    int const owner = choice.expert >= 0 ? choice.expert / L : 0;
    std::size_t const batch = static_cast<std::size_t>(me * L + choice.expert - owner * L) * static_cast<std::size_t>(S);
    if (part == 0) {
      int position = -1;
      if (choice.expert >= 0 && choice.first == lane) {
        position = static_cast<int>(atomicAdd(&counters[choice.expert], 1U));
        at<std::int32_t>(w, owner, a.at.source_slots[a.parity])[batch + position] = t * K + lane;
      }
      block.position_of[quad][lane] = position;
    }
    stage.fill(a.tokens.x + t * a.tokens.x_stride + from, max(0, min(values, a.hidden - from)), a.rule, a.group.weight_first,
               a.group.weight_first ? a.tokens.weights[t * K] : 1.0F);
    sync_quad(quad);

    int const position = block.position_of[quad][lane];
    std::size_t const row = batch + (position >= 0 ? position : 0);
    stage.store(position < 0 ? nullptr : w.peer[owner] + a.at.rows[a.parity] + row * row_bytes + from * (kFp8 ? 1 : 2),
                position < 0 ? nullptr : w.peer[owner] + a.at.scales[a.parity] + (row * a.scale_stride + from / 128) * 4);
    sync_quad(quad);  // position_of may be overwritten
  }
  finish_stores();

  if (is_last_block(own<std::uint32_t>(w, a.at.arrived))) {
    ptx::fence_system();
#pragma unroll 1
    for (int e = tid; e < a.num_experts + w.size; e += kPeerThreads) {
      bool const expert = e < a.num_experts;
      int const owner = expert ? e / L : e - a.num_experts;
      std::uint32_t const n = expert ? ptx::load_relaxed_system(&counters[e]) : static_cast<std::uint32_t>(tokens);
      if (expert) {
        counters[e] = 0;
      }
      ptx::store_relaxed_system(at<std::uint64_t>(w, owner, a.at.counts_of(round)) + me * (L + 1) + (expert ? e % L : L),
                                comm::count_word(round, a.tags.sent, n));
    }
  }
}

/// All quads, one (local expert, source) each: the first thread waits for the counts of this source and those before it, then the quad
/// packs its rows into the batch.
template <bool kFp8>
__device__ inline void pack_rows(PplxMove const& a, PplxBlock& block, std::uint32_t round) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const quad = tid / kQuadThreads;
  int const part = tid / 32 % (kQuadThreads / 32);
  int const R = w.size;
  int const L = a.local_experts;
  int const row_bytes = kFp8 ? a.hidden : 2 * a.hidden;
  std::uint64_t const* const counts = own<std::uint64_t>(w, a.at.counts_of(round));
#pragma unroll 1
  for (int pair = static_cast<int>(blockIdx.x) * kQuads + quad; pair < L * R; pair += static_cast<int>(gridDim.x) * kQuads) {
    int const le = pair / R;
    int const source = pair % R;
    if (tid % kQuadThreads == 0) {
      int const begin = sum_counts(w, counts + le, L + 1, 0, source, round, a.tags.expected);
      int const n = sum_counts(w, counts + le, L + 1, source, source + 1, round, a.tags.expected);
      bool const good = begin >= 0 && n >= 0;
      ptx::fence_system();  // acquires the data that was released with the words
      block.begin_of[quad] = begin;
      block.count_of[quad] = good ? n : 0;
      if (source == R - 1) {
        own<std::int32_t>(w, a.at.num_tokens[a.parity])[le] = good ? begin + n : 0;
      }
    }
    sync_quad(quad);

    int const n = block.count_of[quad];
    std::size_t const from = static_cast<std::size_t>(source * L + le) * static_cast<std::size_t>(a.at.per_source);
    std::size_t const to = static_cast<std::size_t>(le) * a.at.capacity + block.begin_of[quad];
#pragma unroll 1
    for (int i = part; i < n; i += kQuadThreads / 32) {
      copy_vectors(reinterpret_cast<uint4*>(own<char>(w, a.at.batch[a.parity]) + (to + i) * row_bytes),
                   reinterpret_cast<uint4 const*>(own<char>(w, a.at.rows[a.parity]) + (from + i) * row_bytes), row_bytes / 16, lane);
      if constexpr (kFp8) {
        std::uint32_t* const scales = own<std::uint32_t>(w, a.at.batch_scales[a.parity]) + (to + i) * (a.hidden / 128);
#pragma unroll 1
        for (int g = lane; g < a.hidden / 128; g += 32) {
          scales[g] = ptx::load_relaxed_system(own<std::uint32_t>(w, a.at.scales[a.parity]) + (from + i) * a.scale_stride + g);
        }
      }
      if (lane == 0) {
        own<std::int32_t>(w, a.at.origins[a.parity])[to + i] =
            source * a.max_tokens * a.topk +
            static_cast<std::int32_t>(ptx::load_relaxed_system(own<std::uint32_t>(w, a.at.source_slots[a.parity]) + from + i));
      }
    }
    sync_quad(quad);
  }
}

/// One thread for each rank of this rank's group, all of which must hold the same tokens: waits for that rank's number of tokens. A rank
/// that refuses makes the round incomplete; a different number is a failure.
__device__ inline void compare_group(PplxMove const& a, std::uint32_t round, int tokens) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const L = a.local_experts;
  std::uint64_t const* const counts = own<std::uint64_t>(w, a.at.counts_of(round));
  int const r = w.rank - w.rank % a.group.dp_size + static_cast<int>(threadIdx.x);
  int const n = sum_counts(w, counts + L, L + 1, r, r + 1, round, a.tags.expected);
  if (n < 0 || n == tokens) {
    return;
  }
  if (comm::word_tag(ptx::load_relaxed_system(counts + L + r * (L + 1))) == comm::refused_tag(a.tags.expected)) {
    *own<std::uint32_t>(w, a.at.incomplete[a.parity]) = round;
  } else {
    fail(w, ErrorCode::mismatch, comm::ExchangePhase::dispatch_counts, r, round, static_cast<std::uint32_t>(n),
         static_cast<std::uint32_t>(tokens));
  }
}

template <bool kFp8>
__global__ void __launch_bounds__(kPeerThreads, 1) pplx_dispatch(PplxMove const __grid_constant__ a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ PplxBlock block;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);

  begin_dependent_kernel();
  std::uint32_t const round = next_round(w, a.send ? a.at.sent : a.at.received);
  int const M = a.tokens.count();

  if (a.send) {
    send_rows<kFp8>(a, block, shared, round, M);
  }
  if (a.receive) {
    pack_rows<kFp8>(a, block, round);
    if (a.group.dp_size > 1 && blockIdx.x == 0 && tid < a.group.dp_size && a.tags.sent == a.tags.expected) {
      compare_group(a, round, M);
    }
  }

  __syncthreads();
  if (tid == 0) {
    if (a.send) {
      end_round(w, a.at.sent, round);
      if (blockIdx.x == 0) {
        *own<std::uint32_t>(w, a.at.round_of[a.parity]) = round;
      }
    }
    if (a.receive) {
      end_round(w, a.at.received, round);
    }
  }
}

}  // namespace moe::detail
