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
  LowLatencyPieces pieces;  ///< for tokens_bound
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

/// v[i] = sixteen bytes at `offset` of each of the `n` <= 8 rows, asked for in the order kFirst, kFirst + 1, …
template <int kFirst>
__device__ inline void load_terms_from(uint4 (&v)[8], char const* const* rows, int n, std::size_t offset) {
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    constexpr int kLast = 7;
    int const i = (s + kFirst) & kLast;
    if (i < n) {
      v[i] = comm::detail::load_peer(reinterpret_cast<uint4 const*>(rows[i] + offset));
    }
  }
}
/// The order in which rows are asked for decides which link is busy; the order in which they are added does not depend on it.
__device__ inline void load_terms(uint4 (&v)[8], char const* const* rows, int n, int first, std::size_t offset) {
  switch (first & 7) {
    case 0: load_terms_from<0>(v, rows, n, offset); break;
    case 1: load_terms_from<1>(v, rows, n, offset); break;
    case 2: load_terms_from<2>(v, rows, n, offset); break;
    case 3: load_terms_from<3>(v, rows, n, offset); break;
    case 4: load_terms_from<4>(v, rows, n, offset); break;
    case 5: load_terms_from<5>(v, rows, n, offset); break;
    case 6: load_terms_from<6>(v, rows, n, offset); break;
    default: load_terms_from<7>(v, rows, n, offset); break;
  }
}

template <bool kPerRank>
__global__ void __launch_bounds__(kLowLatencyThreads, 1) low_latency_combine(LowLatencyCombine const __grid_constant__ a) {
  using namespace comm::detail;
  __shared__ char const* term_at[comm::kMaxWindowRanks];
  __shared__ float term_weight[comm::kMaxWindowRanks];
  __shared__ int num_terms;
  __shared__ int first_term;
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
  if (block == 0 && tid >= 32 && tid < 32 + R) {  // the experts' kernel is over: its rows may be read
    announce(at<std::uint32_t>(w, tid - 32, a.at.ready) + me, round);
  }
  if (tid == 0) {
    failed = 0;
  }
  LowLatencyPieces pieces = a.pieces;
  if (a.tokens_device != nullptr) {
    pieces = LowLatencyPieces(min(*a.tokens_device, a.tokens_bound), a.hidden, blocks, kCombineUnit);
  }
  unsigned const items = static_cast<unsigned>(pieces.tokens) * static_cast<unsigned>(pieces.per_token);
  int const first = static_cast<int>(items * static_cast<unsigned>(block) / static_cast<unsigned>(blocks));
  int const last = static_cast<int>(items * static_cast<unsigned>(block + 1) / static_cast<unsigned>(blocks));

  // One warp lists the rows to add: a term per choice, or per rank that has choices, ascending.
  auto list_terms = [&](int t) {
    if (tid >= 32) {
      return;
    }
    int const e = tid < K ? a.ids[t * K + tid] : -1;
    int const place = !kPerRank && tid < K ? own<std::int32_t>(w, a.at.sent_slots[a.parity])[t * K + tid] : 0;
    float const weight = !kPerRank && !a.weights_are_one && tid < K ? a.weights[t * K + tid] : 1.0F;
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
        first_term = t;  // tokens ask different ranks first, so that at any moment all links are in use
      }
    } else {
      unsigned const used = __ballot_sync(0xffffffffU, valid);
      if (valid) {
        int const i = __popc(used & ((1U << tid) - 1U));
        int const dst = e / L;
        std::size_t const row = static_cast<std::size_t>(e - dst * L) * a.capacity + place;
        term_at[i] = w.peer[dst] + a.at.outputs[a.parity] + row * a.hidden * 2;
        term_weight[i] = weight;
      }
      if (tid == 0) {
        num_terms = __popc(used);
        first_term = 0;
      }
    }
  };
  if (first < last) {
    list_terms(pieces.token(first));
  }
  __syncthreads();
  if (tid >= 32 && tid < 32 + R) {
    if (!wait_round(w, own<std::uint32_t>(w, a.at.ready) + (tid - 32), round, comm::ExchangePhase::combine_rows, tid - 32)) {
      failed = 1;
    }
  }
  __syncthreads();

  for (int item = first; item < last && failed == 0; ++item) {
    int const t = pieces.token(item);
    if (item != first) {
      __syncthreads();
      list_terms(t);
      __syncthreads();
    }
    int const from = pieces.first_value(item);
    int const units = min(pieces.values, a.hidden - from) / 8;
    int const n = num_terms;
    uint4* const out = reinterpret_cast<uint4*>(a.out + t * a.out_stride + from);
    for (int u = tid; u < units; u += kLowLatencyThreads) {
      float acc[8] = {};
      std::size_t const offset = 2 * static_cast<std::size_t>(from) + 16 * static_cast<std::size_t>(u);
      for (int i0 = 0; i0 < n; i0 += 8) {
        uint4 v[8];
        load_terms(v, term_at + i0, min(n - i0, 8), kPerRank ? first_term : 0, offset);
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
  std::uint32_t const round = *own<std::uint32_t>(w, a.at.round_of[a.parity]);
  std::uint32_t const* const present = own<std::uint32_t>(w, a.at.present[a.parity]);
  for (int row = static_cast<int>(blockIdx.x); row < w.size * a.max_tokens; row += static_cast<int>(gridDim.x)) {
    if (present[row] != round) {
      continue;  // the token chose nothing here
    }
    std::int32_t const* const slot = own<std::int32_t>(w, a.at.choices[a.parity]) + static_cast<std::size_t>(row) * 2 * K;
    float const* const weight = reinterpret_cast<float const*>(slot + K);
    uint4* const out = reinterpret_cast<uint4*>(own<char>(w, a.at.outputs[a.parity]) + static_cast<std::size_t>(row) * a.hidden * 2);
    for (int u = static_cast<int>(threadIdx.x); u < a.hidden / 8; u += static_cast<int>(blockDim.x)) {
      float acc[8] = {};
      for (int j = 0; j < K; ++j) {
        if (int const s = slot[j]; s >= 0) {
          uint4 const v = reinterpret_cast<uint4 const*>(a.y + static_cast<std::size_t>(s) * a.hidden)[u];
          accumulate_eight(acc, v, a.weights_are_one ? 1.0F : weight[j]);
        }
      }
      out[u] = round_eight(acc);
    }
  }
}

}  // namespace moe::detail
