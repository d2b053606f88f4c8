// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/combine.cuh: the combine. Experts write into the window; every rank reads its tokens' rows from the
// peers and sums them with the top-k weights, in choice order, in float32. docs/semantics/exchange.md §8.2 (zero copy).
//
// Reading needs one flag per pair of ranks and no staging: rows are summed in registers as they arrive.
#pragma once

#include <cuda_bf16.h>

#include "moe/backends/window/device/common/rows.cuh"
#include "moe/backends/window/device/common/sums.cuh"
#include "moe/backends/window/device/low_latency/params.hpp"

namespace moe::detail {

struct LowLatencyCombine : LowLatencyKernelParams {
  // What the kernel reads before it sets the ready flag, beside `masks`, in one line of constant memory.
  bool fenced = true;         ///< publish() the ready flag, else announce() it
  std::uint32_t refused = 0;  ///< 1 + ErrorCode: this rank has no outputs
  int parity = 0;
  ExchangeTokens in;             ///< ids and weights as at dispatch; weights are not read in the per-rank layout, whose rows are weighted
  LowLatencyPieces pieces;       ///< pieces of in.tokens
  __nv_bfloat16* out = nullptr;  ///< [M][out_stride]
  std::int64_t out_stride = 0;
};

/// The terms of one token's output.
struct CombineTerms {
  char const* row[comm::kMaxWindowRanks];
  std::uint32_t const* headers[comm::kMaxWindowRanks];  ///< coded outputs only
  float weight[comm::kMaxWindowRanks];
  int count;
  int first;  ///< the term to load first
};

/// One warp lists the rows to add for token t: a term per choice, or per rank that has choices, ascending.
template <bool kPerRank, bool kCoded, class Args>
__device__ inline void list_terms(Args const& a, int t, int lane, CombineTerms& terms) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const K = a.topk;
  int const L = a.local_experts;
  int const me = w.rank;
  int e = lane < K ? expert_of(a.in.ids[t * K + lane], a.experts) : -1;
  int const position = !kPerRank && lane < K ? own<std::int32_t>(w, a.at.sent_positions[a.parity])[t * K + lane] : 0;
  float const weight = !kPerRank && !a.weight_on_input && lane < K ? a.in.weights[t * K + lane] : 1.0F;
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
      terms.first = t;  // tokens start at different ranks, so that all links are busy at any time
    }
  } else {
    if (a.masks && e >= 0 && own<std::uint32_t>(w, comm::WindowControl::masked)[e / L] != 0) {
      e = -1;  // terms of a dead rank are left out
    }
    unsigned const used = __ballot_sync(0xffffffffU, e >= 0);
    if (e >= 0) {
      int const dst = e / L;
      int row = position;
      if (a.masks) {  // the receiver packed the rows by its own counts of lower sources: read them there
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

/// The waits and the bookkeeping of a combine, around body(pieces, first item, last item, terms). `terms` are those of the first item.
template <bool kPerRank, bool kCoded, class Args, class Body>
__device__ inline void combine_with(Args const& a, Body&& body) {
  using namespace comm::detail;
  __shared__ CombineTerms terms;
  __shared__ int failed;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  int const R = w.size;

  begin_dependent_kernel();
  std::uint32_t const round = own<std::uint32_t>(w, a.at.combined)[block] + (a.masks ? 0 : 1);
  if (!a.masks && block == 0 && tid >= 32 && tid < 32 + R) {  // the experts' kernel has ended: peers may read its rows
    std::uint32_t* const ready = at<std::uint32_t>(w, tid - 32, a.at.ready) + w.rank;
    if (a.fenced || a.refused != 0) {
      if (a.refused != 0) {
        refuse(w, tid - 32, round, a.refused);
      }
      publish(ready, round);
    } else {
      announce(ready, round);
    }
  }
  if (tid == 0) {
    failed = 0;
  }
  LowLatencyPieces pieces = a.pieces;
  if (a.in.tokens_device != nullptr) {
    pieces = LowLatencyPieces(min(*a.in.tokens_device, a.in.tokens), a.hidden, blocks, kCombineStep);
  }
  unsigned const items = static_cast<unsigned>(pieces.tokens) * static_cast<unsigned>(pieces.per_token);
  int const first = static_cast<int>(items * static_cast<unsigned>(block) / static_cast<unsigned>(blocks));
  int const last = static_cast<int>(items * static_cast<unsigned>(block + 1) / static_cast<unsigned>(blocks));
  if (first < last && tid < 32) {
    list_terms<kPerRank, kCoded>(a, pieces.token(first), tid, terms);
  }
  __syncthreads();
  if (!a.masks && tid >= 32 && tid < 32 + R) {
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
  if (!a.masks && tid == 0) {
    for (int b = block; b < kMaxExchangeBlocks; b += blocks) {
      own<std::uint32_t>(w, a.at.combined)[b] = round;
    }
  }
}

template <bool kPerRank, class Args>
__device__ inline void combine_rows(Args const& a) {
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

template <bool kPerRank>
__global__ void __launch_bounds__(kLowLatencyThreads, 1) low_latency_combine(LowLatencyCombine const __grid_constant__ a) {
  combine_rows<kPerRank>(a);
}

}  // namespace moe::detail
