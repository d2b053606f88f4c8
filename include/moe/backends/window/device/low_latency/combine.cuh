// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/combine.cuh: the way back. Experts write into the window; every rank reads its tokens' rows from the
// peers and sums them with the top-k weights, in choice order, in float32. Spec 04 §8.2 (zero copy).
//
// Reading needs one flag per pair of ranks and no staging: the sum is done in registers as the rows arrive.
#pragma once

#include <cuda_bf16.h>

#include "moe/backends/window/device/low_latency/dispatch.cuh"

namespace moe::detail {

struct LowLatencyCombine {
  comm::WindowView window;
  LowLatencyLayout at;
  int tokens_bound = 0;
  std::int32_t const* tokens_device = nullptr;
  LowLatencyPieces pieces;  ///< for tokens_bound
  int max_tokens = 0, hidden = 0, topk = 0, num_experts = 0, local_experts = 0, capacity = 0;
  int parity = 0;
  std::int32_t const* ids = nullptr;           ///< [M][k], as at dispatch
  std::int32_t const* expert_place = nullptr;  ///< as at dispatch
  int num_ids = 0;
  float const* weights = nullptr;  ///< [M][k]; not read in the per-rank layout, whose rows are weighted
  bool weights_are_one = false;    ///< the router weight was applied to the input
  bool fenced = true;              ///< publish() the ready flag, else announce() it
  bool met = false;                ///< with masks: low_latency_meet has published and waited
  std::uint32_t refused = 0;       ///< 1 + ErrorCode: this rank's outputs are not there
  __nv_bfloat16* out = nullptr;    ///< [M][out_stride]
  std::int64_t out_stride = 0;
};

/// What one token's output is the sum of.
struct CombineTerms {
  char const* row[comm::kMaxWindowRanks];
  std::uint32_t const* headers[comm::kMaxWindowRanks];  ///< coded outputs only
  float weight[comm::kMaxWindowRanks];
  int count;
  int first;  ///< the one to ask for first
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

/// One warp lists the rows to add for token t: a term per choice, or per rank that has choices, ascending.
template <bool kPerRank, bool kCoded>
__device__ inline void list_terms(LowLatencyCombine const& a, int t, int lane, CombineTerms& terms) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const K = a.topk;
  int const L = a.local_experts;
  int const me = w.rank;
  int e = lane < K ? expert_of(a.ids[t * K + lane], a.expert_place, a.num_ids) : -1;
  int const place = !kPerRank && lane < K ? own<std::int32_t>(w, a.at.sent_slots[a.parity])[t * K + lane] : 0;
  float const weight = !kPerRank && !a.weights_are_one && lane < K ? a.weights[t * K + lane] : 1.0F;
  auto set = [&](int i, int rank, std::size_t row, float by) {
    terms.row[i] = w.peer[rank] + a.at.outputs[a.parity] + row * a.at.output_bytes;
    if constexpr (kCoded) {
      terms.headers[i] = at<std::uint32_t>(w, rank, a.at.headers[a.parity]) + row * ((a.hidden + 127) / 128);
    }
    terms.weight[i] = by;
  };
  if constexpr (kPerRank) {
    unsigned const lo = __reduce_or_sync(0xffffffffU, e >= 0 && e / L < 32 ? 1U << (e / L) : 0U);
    unsigned const hi = __reduce_or_sync(0xffffffffU, e >= 0 && e / L >= 32 ? 1U << (e / L - 32) : 0U);
    std::uint64_t const ranks = (static_cast<std::uint64_t>(hi) << 32) | lo;
    std::size_t const row = static_cast<std::size_t>(me) * a.max_tokens + t;
    for (int r = lane; r < w.size; r += 32) {
      if ((ranks >> r) & 1U) {
        set(__popcll(ranks & ((std::uint64_t{1} << r) - 1)), r, row, 1.0F);
      }
    }
    if (lane == 0) {
      terms.count = __popcll(ranks);
      terms.first = t;  // tokens ask different ranks first, so that at any moment all links are in use
    }
  } else {
    if (a.met && e >= 0 && own<std::uint32_t>(w, comm::WindowControl::masked)[e / L] != 0) {
      e = -1;  // what went to a dead rank is lost
    }
    unsigned const used = __ballot_sync(0xffffffffU, e >= 0);
    if (e >= 0) {
      int const dst = e / L;
      int row = place;
      if (a.met) {  // rows were packed by who received them: how many lower sources had, it alone knows
        std::uint32_t const* const bases = at<std::uint32_t>(w, dst, a.at.bases[a.parity]);
        row += static_cast<int>(ptx::load_relaxed_system(bases + (e - dst * L) * w.size + me)) - me * a.max_tokens;
      }
      set(__popc(used & ((1U << lane) - 1U)), dst, static_cast<std::size_t>(e - dst * L) * a.capacity + row, weight);
    }
    if (lane == 0) {
      terms.count = __popc(used);
      terms.first = 0;
    }
  }
}

/// The waiting of a combine and its bookkeeping, around body(pieces, first item, last item, terms), whose terms are those of the first
/// item.
template <bool kPerRank, bool kCoded, class Body>
__device__ inline void combine_with(LowLatencyCombine const& a, Body&& body) {
  using namespace comm::detail;
  __shared__ CombineTerms terms;
  __shared__ int failed;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  int const R = w.size;

  begin_dependent_kernel();
  std::uint32_t const round = own<std::uint32_t>(w, a.at.combined)[block] + (a.met ? 0 : 1);
  if (!a.met && block == 0 && tid >= 32 && tid < 32 + R) {  // the experts' kernel is over: its rows may be read
    if (a.refused != 0) {
      refuse(w, tid - 32, round, a.refused);
    }
    std::uint32_t* const ready = at<std::uint32_t>(w, tid - 32, a.at.ready) + w.rank;
    if (a.fenced || a.refused != 0) {
      publish(ready, round);
    } else {
      announce(ready, round);
    }
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
  if (first < last && tid < 32) {
    list_terms<kPerRank, kCoded>(a, pieces.token(first), tid, terms);
  }
  __syncthreads();
  if (!a.met && tid >= 32 && tid < 32 + R) {
    if (!wait_round(w, own<std::uint32_t>(w, a.at.ready) + (tid - 32), round, comm::ExchangePhase::combine_rows, tid - 32)) {
      failed = 1;
    } else if (block == 0) {
      check_refusal(w, comm::ExchangePhase::combine_rows, tid - 32, round);
    }
  }
  __syncthreads();
  for (int item = first; item < last && failed == 0; ++item) {
    int const t = pieces.token(item);
    if (item != first) {
      __syncthreads();
      if (tid < 32) {
        list_terms<kPerRank, kCoded>(a, t, tid, terms);
      }
      __syncthreads();
    }
    int const from = pieces.first_value(item);
    body(t, from, min(pieces.values, a.hidden - from), terms);
  }
  __syncthreads();
  if (!a.met && tid == 0) {
    for (int b = block; b < kMaxExchangeBlocks; b += blocks) {
      own<std::uint32_t>(w, a.at.combined)[b] = round;
    }
  }
}

template <bool kPerRank>
__global__ void __launch_bounds__(kLowLatencyThreads, 1) low_latency_combine(LowLatencyCombine const __grid_constant__ a) {
  combine_with<kPerRank, false>(a, [&](int t, int from, int values, CombineTerms const& terms) {
    int const n = terms.count;
    uint4* const out = reinterpret_cast<uint4*>(a.out + t * a.out_stride + from);
    for (int u = static_cast<int>(threadIdx.x); u < values / 8; u += kLowLatencyThreads) {
      float acc[8] = {};
      std::size_t const offset = 2 * static_cast<std::size_t>(from) + 16 * static_cast<std::size_t>(u);
      for (int i0 = 0; i0 < n; i0 += 8) {
        uint4 v[8];
        load_terms(v, terms.row + i0, min(n - i0, 8), kPerRank ? terms.first : 0, offset);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (i0 + i < n) {
            accumulate_eight(acc, v[i], terms.weight[i0 + i]);
          }
        }
      }
      out[u] = round_eight(acc);
    }
  });
}

}  // namespace moe::detail
