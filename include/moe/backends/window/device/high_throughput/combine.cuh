// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/combine.cuh: every rank reads its tokens' rows from the ranks that processed them and sums them in
// rank order. docs/semantics/exchange.md §7.5.
//
// Each rank weights and sums its experts' outputs before peers read the rows. The copy engine keeps enough rows in flight with few blocks:
// each warp owns a ring of stages; a stage holds the same piece of all rows of one token.
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
  bool waits_for_moves = false;  ///< a high_throughput_rows may still run beside this kernel
  bool fenced = true;            ///< publish() the ready flag, else announce() it
  std::uint32_t refused = 0;     ///< 1 + ErrorCode: this rank has no outputs
  __nv_bfloat16* out = nullptr;  ///< [M][out_stride]
  std::int64_t out_stride = 0;
  __nv_bfloat16 const* bias[2] = {};  ///< optional [M][out_stride], added first
};

/// The number of stages of `piece_bytes` that fit for `warps` warps.
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

/// What one pass over the tokens sums: whole rows.
struct HighThroughputWholeRows {
  __device__ static int begin() { return 0; }  ///< first byte of each row
  __device__ static int end(int hidden) { return 2 * hidden; }
};

/// Where a warp is in its ring: the parity of the next stage's barrier, and that stage, to fetch and to sum. Between passes both are the
/// same.
struct HighThroughputRing {
  std::uint32_t phase = 0;
  int stage = 0;
};

/// One warp's ring of stages. Pieces are requested in the order of the sum: token by token, all pieces of a token before the next token.
template <class Part>
class HighThroughputFetcher {
 public:
  /// `full`: a barrier for each stage; `first`, `stride`: the warp's tokens; `part`: which bytes of their rows; `stage`: the first.
  __device__ HighThroughputFetcher(HighThroughputCombine const& a, Part part, unsigned char* ring, std::uint64_t* full, int tokens,
                                   int first, int stride, int stage)
      : a_(a),
        part_(part),
        ring_(ring),
        full_(full),
        sent_rows_(comm::detail::own<std::int32_t>(a.window, a.at.sent_rows[a.parity.routing])),
        tokens_(tokens),
        stride_(stride),
        max_rows_(min(a.topk, a.window.size)),
        pieces_((part.end(a.hidden) - part.begin() + a.piece_bytes - 1) / a.piece_bytes),
        t_(first),
        stage_(stage) {
    int const lane = static_cast<int>(threadIdx.x) % 32;
    rows_ = lane < a.window.size ? a.window.peer[lane] + a.at.outputs[a.parity.rows] + part.begin() : nullptr;
    row_ = t_ < tokens_ ? row_of(t_) : -1;
    later_row_ = t_ + stride_ < tokens_ ? row_of(t_ + stride_) : -1;
  }
  /// The token's row at this lane's rank, or -1.
  __device__ int row_of(int t) const {
    int const lane = static_cast<int>(threadIdx.x) % 32;
    return lane < a_.window.size ? sent_rows_[t * a_.window.size + lane] : -1;
  }
  /// Requests the next piece, from all ranks that have the token, into the next stage. By all lanes.
  __device__ void fetch() {
    if (t_ >= tokens_) {
      return;
    }
    int const lane = static_cast<int>(threadIdx.x) % 32;
    int const row_bytes = 2 * a_.hidden;
    int const bytes = bytes_of(piece_);
    unsigned const with = __ballot_sync(0xffffffffU, row_ >= 0);
    std::uint64_t* const bar = &full_[stage_];
    if (lane == 0) {
      ptx::barrier_expect(bar, bytes * __popc(with));
    }
    __syncwarp();
    if (row_ >= 0) {
      int const i = __popc(with & ((1U << lane) - 1U));
      ptx::bulk_load(ring_ + (stage_ * max_rows_ + i) * a_.piece_bytes,
                     rows_ + static_cast<std::size_t>(row_) * row_bytes + static_cast<std::size_t>(piece_) * a_.piece_bytes, bytes, bar);
    }
    stage_ = stage_ + 1 == a_.stages ? 0 : stage_ + 1;
    if (++piece_ == pieces_) {
      piece_ = 0;
      t_ += stride_;
      row_ = later_row_;
      later_row_ = t_ + stride_ < tokens_ ? row_of(t_ + stride_) : -1;
    }
  }
  /// The rows of a stage, one piece each.
  __device__ uint4 const* stage(int stage) const { return reinterpret_cast<uint4 const*>(ring_ + stage * max_rows_ * a_.piece_bytes); }
  /// The number of pieces of one row, and the bytes of one of them.
  __device__ int pieces() const { return pieces_; }
  __device__ int bytes_of(int piece) const { return min(a_.piece_bytes, part_.end(a_.hidden) - part_.begin() - piece * a_.piece_bytes); }

 private:
  HighThroughputCombine const& a_;
  Part part_;
  unsigned char* ring_;
  std::uint64_t* full_;
  std::int32_t const* sent_rows_;
  int tokens_, stride_, max_rows_, pieces_;
  char const* rows_;  ///< outputs of this lane's rank
  int t_;             ///< state of the next piece to fetch, with the members below
  int piece_ = 0;
  int stage_;
  int row_;
  int later_row_;  ///< row_ of the token after it
};

/// One thread per rank: with `Offers` publishes that peers may read this rank's rows, then waits until this rank may read theirs. The block
/// synchronises before and after the wait. False: a wait failed.
template <bool Offers>
__device__ inline bool meet_ranks(HighThroughputCombine const& a, std::uint32_t round, std::uint64_t* full, int* failed) {
  using namespace comm::detail;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  if (Offers && blockIdx.x == 0 && tid < w.size) {
    if (a.refused != 0) {
      refuse(w, tid, round, a.refused);
    }
    std::uint32_t* const ready = at<std::uint32_t>(w, tid, a.at.ready) + w.rank;
    if (a.fenced || a.refused != 0) {
      publish(ready, round);
    } else {
      announce(ready, round);
    }
  }
  if (tid == 0) {
    *failed = 0;
  }
  if (lane < a.stages) {
    ptx::barrier_init(&full[lane], 1);
    ptx::fence_shared_to_bulk();
  }
  __syncthreads();

  if (tid < w.size) {
    if (!wait_round(w, own<std::uint32_t>(w, a.at.ready) + tid, round, comm::ExchangePhase::combine_rows, tid)) {
      *failed = 1;
    } else if (blockIdx.x == 0) {
      check_refusal(w, comm::ExchangePhase::combine_rows, tid, round);
    }
  }
  ptx::fence_bulk();
  __syncthreads();
  return *failed == 0;
}

/// One warp: adds the rows of its tokens, ranks ascending, as their pieces arrive. `memory`: of its ring.
template <class Part>
__device__ inline void sum_tokens(HighThroughputCombine const& a, Part part, unsigned char* memory, std::uint64_t* full,
                                  HighThroughputRing& ring) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const blocks = static_cast<int>(gridDim.x);
  int const M = a.in.tokens_device != nullptr ? min(*a.in.tokens_device, a.in.tokens) : a.in.tokens;
  int const stride = static_cast<int>(blockDim.x) / 32 * blocks;
  // Neighbouring tokens go to different blocks.
  int const t_first = static_cast<int>(blockIdx.x) + blocks * (static_cast<int>(threadIdx.x) / 32);
  HighThroughputFetcher<Part> fetcher(a, part, memory, full, M, t_first, stride, ring.stage);
  for (int s = 0; s < a.stages; ++s) {
    fetcher.fetch();
  }

  for (int t = t_first; t < M; t += stride) {
    int const n = __popc(__ballot_sync(0xffffffffU, fetcher.row_of(t) >= 0));
    for (int piece = 0; piece < fetcher.pieces(); ++piece) {
      int const vectors = fetcher.bytes_of(piece) / 16;
      std::size_t const column = static_cast<std::size_t>(piece) * (a.piece_bytes / 2) + part.begin() / 2;
      ptx::barrier_wait(&full[ring.stage], ring.phase);
      uint4 const* const in = fetcher.stage(ring.stage);
      uint4* const out = reinterpret_cast<uint4*>(a.out + t * a.out_stride + column);
      for (int u = lane; u < vectors; u += 32) {
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
      fetcher.fetch();
      if (++ring.stage == a.stages) {
        ring.stage = 0;
        ring.phase ^= 1;
      }
    }
  }
}

static __global__ void __launch_bounds__(32 * kHighThroughputWarps, 1)
    high_throughput_combine(HighThroughputCombine const __grid_constant__ a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ std::uint64_t full[kHighThroughputWarps][kHighThroughputStages];
  __shared__ int failed;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const warp = tid / 32;
  int const block = static_cast<int>(blockIdx.x);

  begin_dependent_kernel();
  if (a.waits_for_moves && tid == 0) {  // the barrier of meet_ranks() holds the others
    wait_round(w, own<std::uint32_t>(w, a.at.moved[a.parity.rows]), kMoved, comm::ExchangePhase::dispatch_rows, w.rank);
  }
  std::uint32_t const round = own<std::uint32_t>(w, a.at.combined)[block] + 1;
  if (meet_ranks<true>(a, round, full[warp], &failed)) {
    std::size_t const ring_bytes = static_cast<std::size_t>(a.stages) * min(a.topk, w.size) * a.piece_bytes;
    HighThroughputRing ring;
    sum_tokens(a, HighThroughputWholeRows{}, shared + warp * ring_bytes, full[warp], ring);
  }

  __syncthreads();
  if (tid == 0) {
    for (int b = block; b < kMaxExchangeBlocks; b += static_cast<int>(gridDim.x)) {
      own<std::uint32_t>(w, a.at.combined)[b] = round;
    }
  }
}

/// Sums, over this rank's experts, their weighted outputs for each received row: from expert-major outputs into the row that its source
/// reads. Uses the row counts of the dispatch.
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
