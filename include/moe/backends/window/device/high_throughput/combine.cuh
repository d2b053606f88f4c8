// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/combine.cuh: every rank reads its tokens' rows from the ranks they went to and sums them in rank
// order. Spec 04 §7.5.
//
// Rows are weighted and summed over the rank's experts before they are read. The copy engine keeps enough of them in flight with few
// blocks: each warp owns a ring of stages, a stage holds the same piece of all rows of one token.
#pragma once

#include <cuda_bf16.h>

#include "moe/backends/window/device/common/sums.cuh"
#include "moe/backends/window/device/high_throughput/dispatch.cuh"

namespace moe::detail {

inline constexpr int kHighThroughputStages = 4;  ///< at most

struct HighThroughputCombine : HighThroughputKernelParams {
  ExchangeTokens in;
  HighThroughputParity parity;
  int piece_bytes = 2048;        ///< of each row and stage, a multiple of 512
  int stages = 2;                ///< up to kHighThroughputStages
  bool fenced = true;            ///< publish() the ready flag, else announce() it
  std::uint32_t refused = 0;     ///< 1 + ErrorCode: this rank's outputs are not there
  __nv_bfloat16* out = nullptr;  ///< [M][out_stride]
  std::int64_t out_stride = 0;
  __nv_bfloat16 const* bias[2] = {};  ///< optional [M][out_stride], added first
};

/// Stages of `piece_bytes` that `warps` warps can have at once.
inline int high_throughput_combine_stages(HighThroughputShape const& s, int warps, int piece_bytes) {
  int const rows = std::min(s.topk, s.ranks);
  return std::clamp(kHighThroughputShared / (warps * rows * piece_bytes), 1, kHighThroughputStages);
}
inline int high_throughput_combine_warps(HighThroughputShape const& s, int piece_bytes) {
  int const rows = std::min(s.topk, s.ranks);
  return std::clamp(kHighThroughputShared / (2 * rows * piece_bytes), 1, kHighThroughputWarps);
}
inline std::size_t high_throughput_combine_shared(HighThroughputShape const& s, int warps, int stages, int piece_bytes) {
  return static_cast<std::size_t>(warps) * static_cast<std::size_t>(stages) * static_cast<std::size_t>(std::min(s.topk, s.ranks)) *
         static_cast<std::size_t>(piece_bytes);
}

static __global__ void __launch_bounds__(32 * kHighThroughputWarps, 1)
    high_throughput_combine(HighThroughputCombine const __grid_constant__ a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ std::uint64_t full[kHighThroughputWarps][kHighThroughputStages];
  __shared__ int failed;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const warp = tid / 32;
  int const warps = static_cast<int>(blockDim.x) / 32;
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  int const R = w.size;
  int const me = w.rank;

  begin_dependent_kernel();
  std::uint32_t const round = own<std::uint32_t>(w, a.at.combined)[block] + 1;
  if (block == 0 && tid < R) {
    if (a.refused != 0) {
      refuse(w, tid, round, a.refused);
    }
    std::uint32_t* const ready = at<std::uint32_t>(w, tid, a.at.ready) + me;
    if (a.fenced || a.refused != 0) {
      publish(ready, round);
    } else {
      announce(ready, round);
    }
  }
  if (tid == 0) {
    failed = 0;
  }
  if (lane < a.stages) {
    ptx::barrier_init(&full[warp][lane], 1);
    ptx::fence_shared_to_bulk();
  }
  __syncthreads();
  if (tid < R) {
    if (!wait_round(w, own<std::uint32_t>(w, a.at.ready) + tid, round, comm::ExchangePhase::combine_rows, tid)) {
      failed = 1;
    } else if (block == 0) {
      check_refusal(w, comm::ExchangePhase::combine_rows, tid, round);
    }
  }
  ptx::fence_bulk();
  __syncthreads();

  int const M = a.in.tokens_device != nullptr ? min(*a.in.tokens_device, a.in.tokens) : a.in.tokens;
  std::int32_t const* const sent_rows = own<std::int32_t>(w, a.at.sent_rows[a.parity.routing]);
  int const row_bytes = 2 * a.hidden;
  int const max_rows = min(a.topk, R);
  int const pieces = (row_bytes + a.piece_bytes - 1) / a.piece_bytes;
  int const stride = warps * blocks;
  int const t_first = block + blocks * warp;  // neighbouring tokens on different blocks
  int const S = a.stages;
  unsigned char* const ring = shared + static_cast<std::size_t>(warp) * S * max_rows * a.piece_bytes;
  char const* const rows = lane < R ? w.peer[lane] + a.at.outputs[a.parity.rows] : nullptr;

  // The piece to fetch next.
  int fetch_t = t_first;
  int fetch_piece = 0;
  int fetch_stage = 0;
  int fetch_row = lane < R && fetch_t < M ? sent_rows[fetch_t * R + lane] : -1;
  int later_row = lane < R && fetch_t + stride < M ? sent_rows[(fetch_t + stride) * R + lane] : -1;
  auto fetch = [&] {
    if (fetch_t >= M) {
      return;
    }
    int const bytes = min(a.piece_bytes, row_bytes - fetch_piece * a.piece_bytes);
    unsigned const with = __ballot_sync(0xffffffffU, fetch_row >= 0);
    std::uint64_t* const bar = &full[warp][fetch_stage];
    if (lane == 0) {
      ptx::barrier_expect(bar, bytes * __popc(with));
    }
    __syncwarp();
    if (fetch_row >= 0) {
      int const i = __popc(with & ((1U << lane) - 1U));
      ptx::bulk_load(ring + (fetch_stage * max_rows + i) * a.piece_bytes,
                     rows + static_cast<std::size_t>(fetch_row) * row_bytes + static_cast<std::size_t>(fetch_piece) * a.piece_bytes, bytes,
                     bar);
    }
    fetch_stage = fetch_stage + 1 == S ? 0 : fetch_stage + 1;
    if (++fetch_piece == pieces) {
      fetch_piece = 0;
      fetch_t += stride;
      fetch_row = later_row;
      later_row = lane < R && fetch_t + stride < M ? sent_rows[(fetch_t + stride) * R + lane] : -1;
    }
  };

  if (failed == 0) {
    for (int s = 0; s < S; ++s) {
      fetch();
    }
    int stage = 0;
    std::uint32_t phase = 0;
    for (int t = t_first; t < M; t += stride) {
      int const my_row = lane < R ? sent_rows[t * R + lane] : -1;
      int const n = __popc(__ballot_sync(0xffffffffU, my_row >= 0));
      for (int piece = 0; piece < pieces; ++piece) {
        int const units = min(a.piece_bytes, row_bytes - piece * a.piece_bytes) / 16;
        std::size_t const column = static_cast<std::size_t>(piece) * (a.piece_bytes / 2);
        ptx::barrier_wait(&full[warp][stage], phase);
        uint4 const* const in = reinterpret_cast<uint4 const*>(ring + stage * max_rows * a.piece_bytes);
        uint4* const out = reinterpret_cast<uint4*>(a.out + t * a.out_stride + column);
        for (int u = lane; u < units; u += 32) {
          float acc[8] = {};
          for (int b = 0; b < 2; ++b) {
            if (a.bias[b] != nullptr) {
              accumulate_eight(acc, reinterpret_cast<uint4 const*>(a.bias[b] + t * a.out_stride + column)[u], 1.0F);
            }
          }
          for (int i = 0; i < n; ++i) {
            accumulate_eight(acc, in[i * (a.piece_bytes / 16) + u], 1.0F);
          }
          out[u] = round_eight(acc);
        }
        __syncwarp();
        fetch();
        if (++stage == S) {
          stage = 0;
          phase ^= 1;
        }
      }
    }
  }
  __syncthreads();
  if (tid == 0) {
    for (int b = block; b < kMaxExchangeBlocks; b += blocks) {
      own<std::uint32_t>(w, a.at.combined)[b] = round;
    }
  }
}

/// Weighted sum over this rank's experts of what they computed for each received row, from expert-major outputs into the row that its
/// source reads. Rows as counted by dispatch.
struct HighThroughputReduce : HighThroughputKernelParams {
  HighThroughputParity parity;
  bool weights_are_one = false;
  __nv_bfloat16 const* y = nullptr;  ///< [list entries][H]
};

static __global__ void __launch_bounds__(256) high_throughput_reduce(HighThroughputReduce const __grid_constant__ a) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  begin_dependent_kernel();
  int const K = a.topk;
  int const n = *own<std::int32_t>(w, a.at.summary[a.parity.routing]);
  for (std::int64_t row = blockIdx.x; row < n; row += gridDim.x) {
    std::int32_t const* const record = own<std::int32_t>(w, a.at.records[a.parity.rows]) + row * a.at.record_words;
    float const* const weights = reinterpret_cast<float const*>(record + K);
    uint4* const out = reinterpret_cast<uint4*>(own<char>(w, a.at.outputs[a.parity.rows]) + row * a.hidden * 2);
    for (int u = static_cast<int>(threadIdx.x); u < a.hidden / 8; u += static_cast<int>(blockDim.x)) {
      float acc[8] = {};
      for (int j = 0; j < K; ++j) {
        if (int const s = record[2 * K + j]; s >= 0) {
          accumulate_eight(acc, reinterpret_cast<uint4 const*>(a.y + static_cast<std::size_t>(s) * a.hidden)[u],
                           a.weights_are_one ? 1.0F : weights[j]);
        }
      }
      out[u] = round_eight(acc);
    }
  }
}

}  // namespace moe::detail
