// SPDX-License-Identifier: Apache-2.0
// backends/window/device/common/peer_rows.cuh: common parts of the kernels of OneSided, TwoSided and Pplx: rounds, rows staged in shared
// memory, detecting the last block, sums of rows.
//
// Four warps, a quad, work on one row together: each stages a quarter of it, and the copy engine stores that to all destinations.
#pragma once

#include "moe/backends/window/device/common/launch.cuh"
#include "moe/backends/window/device/common/peer_rows.hpp"
#include "moe/backends/window/device/common/rows.cuh"
#include "moe/backends/window/device/common/sums.cuh"
#include "moe/core/ptx/bulk_copy.cuh"
#include "moe/core/ptx/mbarrier.cuh"
#include "moe/core/ptx/named_barrier.cuh"

namespace moe::detail {

inline constexpr int kPeerThreads = 512;
inline constexpr int kQuadThreads = 128;
inline constexpr int kQuads = kPeerThreads / kQuadThreads;

/// Values of a row that each of `parts` warps takes: multiples of 512, so that their scales are whole 16-byte vectors.
MOE_HD constexpr int part_values(int hidden, int parts) { return (hidden + 512 * parts - 1) / (512 * parts) * 512; }
/// Bytes that `values` values and their scales take in shared memory.
MOE_HD constexpr int staged_bytes(bool fp8, int values) {
  return ((fp8 ? values + (values / 128 + 3) / 4 * 16 : 2 * values) + 127) / 128 * 128;
}

/// Shared memory of a kernel whose quads stage rows.
inline int quad_shared(PeerShape const& s) { return kPeerThreads / 32 * staged_bytes(s.fp8, part_values(s.hidden, kQuadThreads / 32)); }
/// E_UNSUPPORTED unless the device has the copy engine.
inline void expect_peer_device(PeerShape const& s) {
  if (int const sm = device_architecture(); sm < 90) {
    throw Error(ErrorCode::unsupported, text(s.name, ": the device is sm_", sm, ", sm_90 or newer is needed for its copy engine"));
  }
}

/// The number of the round that begins, from this block's word.
__device__ inline std::uint32_t next_round(comm::WindowView const& w, std::size_t rounds) {
  return comm::detail::own<std::uint32_t>(w, rounds)[blockIdx.x] + 1;
}
/// Ends the round for this block; also advances the words of blocks that this launch does not have. By one thread.
__device__ inline void end_round(comm::WindowView const& w, std::size_t rounds, std::uint32_t round) {
#pragma unroll 1
  for (unsigned b = blockIdx.x; b < kMaxExchangeBlocks; b += gridDim.x) {
    comm::detail::own<std::uint32_t>(w, rounds)[b] = round;
  }
}

/// True on all threads of the last block to arrive here; it then sees what the other blocks wrote before, and so does the system.
__device__ inline bool is_last_block(std::uint32_t* arrived) {
  bool last = false;
  __syncthreads();
  if (threadIdx.x == 0) {
    ptx::fence_system();
    last = atomicAdd(arrived, 1U) == gridDim.x - 1;
    if (last) {
      *arrived = 0;
      __threadfence();
    }
  }
  return __syncthreads_or(last ? 1 : 0) != 0;
}

/// Barrier of the quad's warps.
__device__ inline void sync_quad(int quad) { ptx::named_barrier(quad + 1, kQuadThreads); }

/// The part of a row that one warp holds in shared memory, in wire format: values, then scales. All lanes call all functions.
template <bool kFp8>
class WarpStage {
 public:
  /// `shared`: staged_bytes(kFp8, most values), 128-byte aligned; `loaded`: a barrier in shared memory.
  __device__ WarpStage(unsigned char* shared, std::uint64_t* loaded, int lane) : row_(shared), loaded_(loaded), lane_(lane) {
    if (!kFp8 && lane == 0) {
      ptx::barrier_init(loaded, 1);
      ptx::fence_shared_to_bulk();
    }
    __syncwarp();
  }
  /// Loads `values` values from x, times `factor` if `scaled`. Waits until the copy engine has read the part staged before.
  __device__ void fill(__nv_bfloat16 const* x, int values, ScaleRule const& rule, bool scaled = false, float factor = 1.0F) {
    using namespace comm::detail;
    values_ = values;
    if constexpr (kFp8) {
      quantize_row(x, values, rule, lane_, row_, reinterpret_cast<float*>(row_ + values), scaled, factor);
      return;
    }
    ptx::bulk_wait_read();
    __syncwarp();
    if (scaled) {
#pragma unroll 1
      for (int u = lane_; u < values / 8; u += 32) {
        reinterpret_cast<uint4*>(row_)[u] = scale_eight(reinterpret_cast<uint4 const*>(x)[u], factor);
      }
      ptx::fence_shared_to_bulk();
      __syncwarp();
    } else if (values > 0) {
      if (lane_ == 0) {
        ptx::barrier_expect(loaded_, 2 * values);
        ptx::bulk_load(row_, x, 2 * values, loaded_);
      }
      __syncwarp();
      ptx::barrier_wait(loaded_, phase_);
      phase_ ^= 1;
    }
  }
  /// This lane stores the values, and their scales in whole 16-byte vectors, to its destination; null: none. Does not wait for completion.
  __device__ void store(char* values_to, char* scales_to) const {
    if (values_to != nullptr && values_ > 0) {
      ptx::bulk_store(values_to, row_, kFp8 ? values_ : 2 * values_);
      if constexpr (kFp8) {
        ptx::bulk_store(scales_to, row_ + values_, (values_ / 128 + 3) / 4 * 16);
      }
      ptx::bulk_commit();
    }
  }

 private:
  unsigned char* row_;
  std::uint64_t* loaded_;
  int lane_;
  int values_ = 0;
  std::uint32_t phase_ = 0;
};

/// Completes all stores of this thread, by the copy engine or not, before what follows.
__device__ inline void finish_stores() {
  ptx::bulk_wait();
  ptx::fence_bulk();
}

/// The rows that are added into one output row; one for each quad, in shared memory.
struct Terms {
  char const* row[32];
  float weight[32];
  int count;
};
/// out[0, H) = Σ_i weight[i] row[i][0, H), in this order, in float32, one rounding; rows in bf16. By the 128 threads of a quad. `first`:
/// the row to load first, chosen so that all links are busy at any time.
__device__ inline void sum_terms(Terms const& terms, int first, int hidden, __nv_bfloat16* out) {
  int const n = terms.count;
#pragma unroll 1
  for (int u = static_cast<int>(threadIdx.x) % kQuadThreads; u < hidden / 8; u += kQuadThreads) {
    float acc[8] = {};
#pragma unroll 1
    for (int i0 = 0; i0 < n; i0 += 8) {
      uint4 v[8];
      load_terms(v, terms.row + i0, min(n - i0, 8), first, 16 * static_cast<std::size_t>(u));
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i0 + i < n) {
          accumulate_eight(acc, v[i], terms.weight[i0 + i]);
        }
      }
    }
    reinterpret_cast<uint4*>(out)[u] = round_eight(acc);
  }
}

/// The tokens part of every kernel's arguments.
struct PeerTokens {
  int bound = 0;                         ///< M, or an upper bound
  std::int32_t const* device = nullptr;  ///< optional: M on the device
  __nv_bfloat16 const* x = nullptr;      ///< [M][x_stride]
  std::int64_t x_stride = 0;
  std::int32_t const* ids = nullptr;           ///< [M][k] global ids, -1: none
  float const* weights = nullptr;              ///< [M][k]
  std::int32_t const* expert_place = nullptr;  ///< [num_ids] rank * L + local of every id; null: the id itself
  int num_ids = 0;
  __device__ int count() const { return device != nullptr ? min(*device, bound) : bound; }
  /// Where the expert of choice i = t k + j is, rank * L + local, or -1.
  __device__ int place(int i) const { return place_of(ids[i]); }
  /// The same for an id. The lookup is skipped if there is no table.
  __device__ int place_of(int id) const {
    bool const known = static_cast<unsigned>(id) < static_cast<unsigned>(num_ids);
    if (__builtin_expect(static_cast<long>(expert_place != nullptr), 0L) != 0) {
      return known ? expert_place[id] : -1;
    }
    return known ? id : -1;
  }
};

/// The common part of every kernel's parameters. PeerCalls::params() makes it from what the ranks agree on and from one call's tokens.
template <class Layout>
struct PeerParams {
  comm::WindowView window;
  Layout at;
  PeerTokens tokens;
  ScaleRule rule;
  int max_tokens = 0, hidden = 0, topk = 0, num_experts = 0, local_experts = 0, scale_stride = 0;
  int parity = 0;
};
template <class Layout>
PeerParams<Layout> PeerCalls<Layout>::params(ExchangeTokens const& in, int parity) const {
  PeerTokens const tokens{in.tokens, in.tokens_device, in.x, in.x_stride, in.ids, in.weights, options_.expert_place, options_.num_ids};
  return {window_,
          at_,
          tokens,
          options_.rule,
          shape_.max_tokens,
          shape_.hidden,
          shape_.topk,
          shape_.num_experts,
          shape_.local_experts(),
          shape_.scale_stride(),
          parity};
}

/// The tag of the count words of a call.
struct PeerTags {
  std::uint32_t expected = 0;  ///< from every rank that takes part
  std::uint32_t sent = 0;      ///< by this rank: expected, or refused_tag(expected)
};
inline PeerTags peer_tags(comm::HeaderTag const& tag, std::uint32_t refused) {
  return {tag.value(), refused != 0 ? comm::refused_tag(tag.value()) : tag.value()};
}

/// The two words in which one peer may have refused a combine that does not wait for all ranks. Loaded at the start of the next combine, or
/// of the same one by threads that have waited; evaluated when the thread is idle.
struct PeerRefusals {
  std::uint32_t even = 0;
  std::uint32_t odd = 0;
  __device__ void load(comm::WindowView const& w, int peer) {
    even = comm::detail::load_refusal(w, peer, 0);
    odd = comm::detail::load_refusal(w, peer, 1);
  }
  __device__ void report_combine(comm::WindowView const& w, int peer, std::uint32_t round) const {
    bool const is_even = (round & 1U) == 0;
    comm::detail::report_refusal(w, is_even ? odd : even, comm::ExchangePhase::combine_rows, peer, round - 1);
    comm::detail::report_refusal(w, is_even ? even : odd, comm::ExchangePhase::combine_rows, peer, round);
  }
};

/// Runs before the kernels of an operation of `round` = *rounds + ahead: tells the peers that this rank cannot take part.
static __global__ void refuse_operation(comm::WindowView const __grid_constant__ w, std::size_t rounds, std::uint32_t ahead,
                                        std::uint64_t ranks, std::uint32_t code) {
  std::uint32_t const round = *comm::detail::own<std::uint32_t>(w, rounds) + ahead;
  if (int const r = static_cast<int>(threadIdx.x); r < w.size && ((ranks >> r) & 1U) != 0) {
    comm::detail::refuse(w, r, round, code);
    ptx::fence_system();
  }
}
/// Enqueues refuse_operation. `rounds`: offset of the word that counts the operation, `ahead` below its round; `ranks`: the ranks to tell.
inline void enqueue_refusal(comm::WindowView const& w, std::size_t rounds, int ahead, std::uint64_t ranks, std::uint32_t code,
                            cudaStream_t stream) {
  refuse_operation<<<1, comm::kMaxWindowRanks, 0, stream>>>(w, rounds, static_cast<std::uint32_t>(ahead), ranks, code);
  check_launch("refuse_operation");
}
inline constexpr std::uint64_t kAllRanks = ~std::uint64_t{0};

/// Rounds float32 outputs once: every row of `y` for which valid(row) is true.
template <class Valid>
__global__ void round_peer_rows(float const* y, Valid valid, int rows, int hidden, __nv_bfloat16* out) {
  comm::detail::begin_dependent_kernel();
  for (int row = static_cast<int>(blockIdx.x); row < rows; row += static_cast<int>(gridDim.x)) {
    if (!valid(row)) {
      continue;
    }
    std::size_t const at = static_cast<std::size_t>(row) * hidden;
    for (int h = 4 * static_cast<int>(threadIdx.x); h < hidden; h += 4 * static_cast<int>(blockDim.x)) {
      float4 const v = *reinterpret_cast<float4 const*>(y + at + h);
      __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
      *reinterpret_cast<uint2*>(out + at + h) = *reinterpret_cast<uint2 const*>(pair);
    }
  }
}

}  // namespace moe::detail
