// SPDX-License-Identifier: Apache-2.0
// backends/low_latency_combine.cuh: the way back. Experts write into the window; every rank reads its tokens' rows from the peers and
// sums them with the top-k weights, in choice order, in float32. Spec 04 §8.2 (zero copy).
//
// Reading needs one flag per pair of ranks and no staging: the sum is done in registers as the rows arrive.
#pragma once

#include <cuda_bf16.h>

#include "moe/backends/low_latency_dispatch.cuh"

namespace moe::detail {

struct LowLatencyCombine {
  comm::WindowView window;
  LowLatencyLayout at;
  int tokens_bound = 0;
  std::int32_t const* tokens_device = nullptr;
  int max_tokens = 0, hidden = 0, topk = 0, num_experts = 0, local_experts = 0, capacity = 0;
  int parity = 0;
  std::int32_t const* ids = nullptr;  ///< [M][k], as at dispatch
  float const* weights = nullptr;     ///< [M][k]; not read in the per-rank layout, whose rows are weighted
  bool weights_are_one = false;       ///< the router weight was applied to the input
  __nv_bfloat16* out = nullptr;       ///< [M][out_stride]
  std::int64_t out_stride = 0;
};

/// acc += weight * the eight bf16 values of v.
__device__ inline void accumulate_eight(float (&acc)[8], uint4 const& v, float weight) {
  std::uint32_t const words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    acc[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), acc[2 * i]);
    acc[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xffff0000U), acc[2 * i + 1]);
  }
}
__device__ inline uint4 round_eight(float const (&acc)[8]) {
  uint4 v;
  __nv_bfloat162* const pairs = reinterpret_cast<__nv_bfloat162*>(&v);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = __floats2bfloat162_rn(acc[2 * i], acc[2 * i + 1]);
  }
  return v;
}

template <bool kPerRank>
__global__ void __launch_bounds__(kLowLatencyThreads, 1) low_latency_combine(LowLatencyCombine const __grid_constant__ a) {
  using namespace comm::detail;
  __shared__ char const* term_at[comm::kMaxWindowRanks];
  __shared__ float term_weight[comm::kMaxWindowRanks];
  __shared__ int num_terms;
  __shared__ int failed;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  int const R = w.size;
  int const me = w.rank;
  int const K = a.topk;
  int const L = a.local_experts;

  begin_dependent_kernel();
  std::uint32_t const round = own<std::uint32_t>(w, a.at.combined)[block] + 1;
  if (block == 0 && tid < R) {  // the experts' kernel is over: its rows may be read
    fence_system();
    store_release(at<std::uint32_t>(w, tid, a.at.ready) + me, round);
  }
  if (tid == 0) {
    failed = 0;
  }
  int const M = a.tokens_device != nullptr ? min(*a.tokens_device, a.tokens_bound) : a.tokens_bound;
  LowLatencyPieces const pieces(M, a.hidden, blocks, 256);
  std::int64_t const items = static_cast<std::int64_t>(M) * pieces.per_token;
  int const first = static_cast<int>(items * block / blocks);
  int const last = static_cast<int>(items * (block + 1) / blocks);

  // One warp lists the rows to add: a term per choice, or per rank that has choices, ascending.
  auto list_terms = [&](int t) {
    if (tid >= 32) {
      return;
    }
    int const e = tid < K ? a.ids[t * K + tid] : -1;
    bool const valid = e >= 0 && e < a.num_experts;
    if constexpr (kPerRank) {
      unsigned const lo = __reduce_or_sync(0xffffffffU, valid && e / L < 32 ? 1U << (e / L) : 0U);
      unsigned const hi = __reduce_or_sync(0xffffffffU, valid && e / L >= 32 ? 1U << (e / L - 32) : 0U);
      std::uint64_t const ranks = (static_cast<std::uint64_t>(hi) << 32) | lo;
      std::size_t const row = static_cast<std::size_t>(me) * a.max_tokens + t;
      for (int r = tid; r < R; r += 32) {
        if ((ranks >> r) & 1U) {
          int const i = __popcll(ranks & ((std::uint64_t{1} << r) - 1));
          term_at[i] = w.peer[r] + a.at.outputs[a.parity] + row * a.hidden * 2;
          term_weight[i] = 1.0F;
        }
      }
      if (tid == 0) {
        num_terms = __popcll(ranks);
      }
    } else {
      unsigned const used = __ballot_sync(0xffffffffU, valid);
      if (valid) {
        int const i = __popc(used & ((1U << tid) - 1U));
        int const dst = e / L;
        int const place = own<std::int32_t>(w, a.at.sent_slots[a.parity])[t * K + tid];
        std::size_t const row = static_cast<std::size_t>(e - dst * L) * a.capacity + place;
        term_at[i] = w.peer[dst] + a.at.outputs[a.parity] + row * a.hidden * 2;
        term_weight[i] = a.weights_are_one ? 1.0F : a.weights[t * K + tid];
      }
      if (tid == 0) {
        num_terms = __popc(used);
      }
    }
  };
  if (first < last) {
    list_terms(first / pieces.per_token);
  }
  __syncthreads();
  if (tid >= 32 && tid < 32 + R) {
    if (!wait_round(w, own<std::uint32_t>(w, a.at.ready) + (tid - 32), round, comm::ExchangePhase::combine_rows, tid - 32)) {
      failed = 1;
    }
  }
  __syncthreads();

  for (int item = first; item < last && failed == 0; ++item) {
    int const t = item / pieces.per_token;
    if (item != first) {
      __syncthreads();
      list_terms(t);
      __syncthreads();
    }
    int const from = (item % pieces.per_token) * pieces.values;
    int const units = min(pieces.values, a.hidden - from) / 8;
    int const n = num_terms;
    uint4* const out = reinterpret_cast<uint4*>(a.out + t * a.out_stride + from);
    for (int u = tid; u < units; u += kLowLatencyThreads) {
      float acc[8] = {};
      std::size_t const offset = 2 * static_cast<std::size_t>(from) + 16 * static_cast<std::size_t>(u);
      for (int i0 = 0; i0 < n; i0 += 8) {
        uint4 v[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (i0 + i < n) {
            v[i] = load_peer(reinterpret_cast<uint4 const*>(term_at[i0 + i] + offset));
          }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (i0 + i < n) {
            accumulate_eight(acc, v[i], term_weight[i0 + i]);
          }
        }
      }
      out[u] = round_eight(acc);
    }
  }
  __syncthreads();
  if (tid == 0) {
    for (int b = block; b < kMaxExchangeBlocks; b += blocks) {
      own<std::uint32_t>(w, a.at.combined)[b] = round;
    }
  }
}

/// Per-rank layout: what the experts computed for one received row, weighted and summed over this rank's choices in their order, into the
/// row that its source will read. Blocks take rows in turn.
struct LowLatencyReduce {
  comm::WindowView window;
  LowLatencyLayout at;
  int max_tokens = 0, hidden = 0, topk = 0, num_experts = 0;
  int parity = 0;
  bool weights_are_one = false;
  __nv_bfloat16 const* y = nullptr;  ///< [L*C][H] expert outputs
};

static __global__ void __launch_bounds__(256) low_latency_reduce(LowLatencyReduce const __grid_constant__ a) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  begin_dependent_kernel();
  int const K = a.topk;
  std::uint64_t const* const counts = own<std::uint64_t>(w, a.at.counts[a.parity]);
  std::int32_t const* const slots = own<std::int32_t>(w, a.at.slots[a.parity]);
  float const* const weights = own<float>(w, a.at.weights[a.parity]);
  for (int row = static_cast<int>(blockIdx.x); row < w.size * a.max_tokens; row += static_cast<int>(gridDim.x)) {
    int const src = row / a.max_tokens;
    int const t = row % a.max_tokens;
    auto const tokens = static_cast<int>(comm::word_count(counts[static_cast<std::size_t>(src) * a.at.count_stride + a.num_experts]));
    if (t >= tokens) {
      continue;
    }
    std::int32_t const* const slot = slots + static_cast<std::size_t>(row) * K;
    bool any = false;
    for (int j = 0; j < K; ++j) {
      any = any || slot[j] >= 0;
    }
    if (!any) {
      continue;
    }
    uint4* const out = reinterpret_cast<uint4*>(own<char>(w, a.at.outputs[a.parity]) + static_cast<std::size_t>(row) * a.hidden * 2);
    for (int u = static_cast<int>(threadIdx.x); u < a.hidden / 8; u += static_cast<int>(blockDim.x)) {
      float acc[8] = {};
      for (int j = 0; j < K; ++j) {
        if (int const s = slot[j]; s >= 0) {
          uint4 const v = reinterpret_cast<uint4 const*>(a.y + static_cast<std::size_t>(s) * a.hidden)[u];
          accumulate_eight(acc, v, a.weights_are_one ? 1.0F : weights[static_cast<std::size_t>(row) * K + j]);
        }
      }
      out[u] = round_eight(acc);
    }
  }
}

}  // namespace moe::detail
