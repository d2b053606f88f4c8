// SPDX-License-Identifier: Apache-2.0
// backends/low_latency_dispatch.cuh: rows quantised and stored into the owning peer's memory, with counts and arrival flags. Spec 04 §8.1.
//
// One kernel, no host, no barrier. Every rank tells every rank how many rows it has for each expert; from these counts each sender knows
// where its rows begin in every batch (sources in rank order, tokens in token order), so rows land packed and in a fixed order, without a
// copy on the receiving side. The counts travel while the row is being quantised.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "moe/backends/low_latency_layout.hpp"
#include "moe/comm/symmetric_memory.cuh"

namespace moe::detail {

inline constexpr int kLowLatencyThreads = 512;

/// How a batch of tokens is cut into pieces of whole units, so that few tokens still occupy all blocks.
struct LowLatencyPieces {
  int tokens = 0;
  int per_token = 1;
  int values = 0;  ///< of one piece; the last of a token may be shorter
  LowLatencyPieces() = default;
  MOE_HD int token(int item) const { return per_token == 1 ? item : item / per_token; }
  MOE_HD int first_value(int item) const { return per_token == 1 ? 0 : item % per_token * values; }
  MOE_HD LowLatencyPieces(int tokens, int hidden, int blocks, int unit) : tokens(tokens) {
    int const units = (hidden + unit - 1) / unit;
    int wanted = tokens > 0 ? blocks / tokens : 1;
    wanted = wanted < 1 ? 1 : wanted > units ? units : wanted;
    int const each = (units + wanted - 1) / wanted;
    values = each * unit;
    per_token = (units + each - 1) / each;
  }
};
inline constexpr int kDispatchUnit = 512;  ///< values: scales of a piece are whole 16-byte units
inline constexpr int kCombineUnit = 256;

struct LowLatencyDispatch {
  comm::WindowView window;
  LowLatencyLayout at;
  int tokens_bound = 0;                         ///< M, or its bound when tokens_device is given
  LowLatencyPieces pieces;                      ///< for tokens_bound, so that the usual call divides nothing
  std::int32_t const* tokens_device = nullptr;  ///< optional: M on the device
  int max_tokens = 0, hidden = 0, topk = 0, num_experts = 0, local_experts = 0, capacity = 0;
  std::uint32_t tag = 0;
  int parity = 0;
  bool send = true;
  bool receive = true;
  bool pow2_scales = false;  ///< scales rounded up to powers of two
  float amax_floor = 1e-4F;
  __nv_bfloat16 const* x = nullptr;  ///< [M][x_stride]
  std::int64_t x_stride = 0;
  std::int32_t const* ids = nullptr;          ///< [M][k] global ids, -1: none
  float const* weights = nullptr;             ///< [M][k]; read in the per-rank layout only
  std::int32_t* expert_num_tokens = nullptr;  ///< out [L]
};

/// Division by a scale whose reciprocal is known, rounded as x / s is: one Newton step on the residual.
__device__ inline float divide_by(float x, float s, float inverse) {
  float const q = x * inverse;
  return fmaf(fmaf(-q, s, x), inverse, q);
}

/// Sixteen bf16 values of a group of 128 that eight neighbouring lanes hold → sixteen e4m3 codes and the group's scale.
/// A group with NaN or infinity: scale and codes NaN. All 32 lanes must call it.
__device__ inline uint4 quantize_sixteen(uint4 const (&v)[2], float amax_floor, bool pow2, float& scale) {
  std::uint32_t m = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    m = __vmaxu2(m, v[i].x & 0x7fff7fffU);
    m = __vmaxu2(m, v[i].y & 0x7fff7fffU);
    m = __vmaxu2(m, v[i].z & 0x7fff7fffU);
    m = __vmaxu2(m, v[i].w & 0x7fff7fffU);
  }
#pragma unroll
  for (int o = 4; o > 0; o >>= 1) {
    m = __vmaxu2(m, __shfl_xor_sync(0xffffffffU, m, o));
  }
  std::uint32_t const amax_bits = max(m & 0xffffU, m >> 16) << 16;
  bool const finite = amax_bits < 0x7f800000U;
  float const s = __fdiv_rn(fmaxf(__uint_as_float(amax_bits), amax_floor), 448.0F);
  scale = pow2 ? __uint_as_float((__float_as_uint(s) + 0x7fffffU) & 0xff800000U) : s;
  scale = finite ? scale : __uint_as_float(0x7fc00000U);
  float const inverse = __frcp_rn(scale);
  uint4 out;
  std::uint32_t* const codes = &out.x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint4 const& half = v[i / 2];
    std::uint32_t const lo = i % 2 == 0 ? half.x : half.z;
    std::uint32_t const hi = i % 2 == 0 ? half.y : half.w;
    float2 const a =
        make_float2(divide_by(__uint_as_float(lo << 16), scale, inverse), divide_by(__uint_as_float(lo & 0xffff0000U), scale, inverse));
    float2 const b =
        make_float2(divide_by(__uint_as_float(hi << 16), scale, inverse), divide_by(__uint_as_float(hi & 0xffff0000U), scale, inverse));
    codes[i] = static_cast<std::uint32_t>(__nv_cvt_float2_to_fp8x2(a, __NV_SATFINITE, __NV_E4M3)) |
               (static_cast<std::uint32_t>(__nv_cvt_float2_to_fp8x2(b, __NV_SATFINITE, __NV_E4M3)) << 16);
  }
  return out;
}

/// Shared memory: own choices (target addresses), [E] counts before this block's tokens, [E] all counts, own choices (expert, place), two
/// rows.
inline std::size_t low_latency_dispatch_shared(LowLatencyShape const& s) {
  auto const own = static_cast<std::size_t>((s.max_tokens + s.blocks - 1) / s.blocks + 2) * static_cast<std::size_t>(s.topk);
  std::size_t const row =
      s.fp8 ? static_cast<std::size_t>(s.hidden) + 4 * static_cast<std::size_t>(s.groups()) : 2 * static_cast<std::size_t>(s.hidden);
  return (8 * static_cast<std::size_t>(s.num_experts) + 28 * own + 15) / 16 * 16 + 2 * ((row + 15) / 16 * 16);
}

template <bool kFp8, bool kPerRank>
__global__ void __launch_bounds__(kLowLatencyThreads, 1) low_latency_dispatch(LowLatencyDispatch const __grid_constant__ a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int failed;
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  int const R = w.size;
  int const me = w.rank;
  int const K = a.topk;
  int const E = a.num_experts;
  int const L = a.local_experts;

  // Until the previous kernel is over, only what it cannot touch: the shared memory of this block.
  int const own_capacity = ((a.max_tokens + blocks - 1) / blocks + 2) * K;
  char** const row_target = reinterpret_cast<char**>(shared);  // of each own choice; null: nothing to store
  char** const scale_target = row_target + own_capacity;
  int* const before = reinterpret_cast<int*>(scale_target + own_capacity);  // [E] rows ahead of this block's tokens
  int* const total = before + E;                                            // [E] all rows of this rank
  int* const expert = total + E;
  int* const place = expert + own_capacity;
  int* const rank_of = place + own_capacity;
  unsigned char* const row_base = shared + (8 * E + 28 * own_capacity + 15) / 16 * 16;
  if (a.send) {
    for (int e = tid; e < 2 * E; e += kLowLatencyThreads) {
      before[e] = 0;
    }
  }
  if (tid == 0) {
    failed = 0;
  }
  begin_dependent_kernel();
  std::uint32_t* const round_word = own<std::uint32_t>(w, a.send ? a.at.sent : a.at.received) + block;
  std::uint32_t const round = *round_word + 1;
  LowLatencyPieces pieces = a.pieces;
  if (a.tokens_device != nullptr) {
    pieces = LowLatencyPieces(min(*a.tokens_device, a.tokens_bound), a.hidden, blocks, kDispatchUnit);
  }
  int const M = pieces.tokens;
  std::uint64_t* const own_counts = own<std::uint64_t>(w, a.at.counts[a.parity]);
  __syncthreads();

  if (a.send) {
    unsigned const items = static_cast<unsigned>(M) * static_cast<unsigned>(pieces.per_token);
    int const first = static_cast<int>(items * static_cast<unsigned>(block) / static_cast<unsigned>(blocks));
    int const last = static_cast<int>(items * static_cast<unsigned>(block + 1) / static_cast<unsigned>(blocks));
    int const t_first = pieces.token(first);
    int const t_last = first == last ? t_first : pieces.token(last - 1) + 1;
    int const n_own = (t_last - t_first) * K;
    int const piece_bytes = kFp8 ? a.hidden + a.hidden / 32 : 2 * a.hidden;
    int const row_stride = (piece_bytes + 15) / 16 * 16;

    // The first piece is on its way while places are worked out. One step of the loop below covers 16 (8) values a thread.
    uint4 early[2] = {};
    if (first < last) {
      int const from = (first - t_first * pieces.per_token) * pieces.values;
      int const n = min(pieces.values, a.hidden - from);
      uint4 const* const x = reinterpret_cast<uint4 const*>(a.x + t_first * a.x_stride + from);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const u = kFp8 ? 2 * tid + i : tid + i * kLowLatencyThreads;
        early[i] = u < n / 8 ? x[u] : uint4{};
      }
    }

    int const flat_first = t_first * K;
    int const early_id = tid < n_own ? a.ids[flat_first + tid] : -1;  // of the first warp's first round below

    // Quantises piece `item` into one half of the row buffer. The whole block calls it.
    auto stage = [&](int item, unsigned char* row) {
      int const t = pieces.token(item);
      int const from = pieces.first_value(item);
      int const n = min(pieces.values, a.hidden - from);
      uint4 const* const x = reinterpret_cast<uint4 const*>(a.x + t * a.x_stride + from);
      if constexpr (kFp8) {
        int const units = n / 16;
        float* const scales = reinterpret_cast<float*>(row + n);
        for (int u0 = tid - lane; u0 < units; u0 += kLowLatencyThreads) {
          int const u = u0 + lane;
          uint4 v[2] = {early[0], early[1]};
          if (item != first || u0 >= kLowLatencyThreads) {
            v[0] = u < units ? x[2 * u] : uint4{};
            v[1] = u < units ? x[2 * u + 1] : uint4{};
          }
          float scale;
          uint4 const codes = quantize_sixteen(v, a.amax_floor, a.pow2_scales, scale);
          if (u < units) {
            reinterpret_cast<uint4*>(row)[u] = codes;
            if (u % 8 == 0) {
              scales[u / 8] = scale;
            }
          }
        }
      } else {
        for (int u = tid; u < n / 8; u += kLowLatencyThreads) {
          int const step = u / kLowLatencyThreads;
          reinterpret_cast<uint4*>(row)[u] = item == first && step < 2 ? (step == 0 ? early[0] : early[1]) : x[u];
        }
      }
    };

    // Counts of all rows, and of the rows before this block's first token: places follow without atomics on memory, in token order.
    for (int i = tid; i < M * K; i += kLowLatencyThreads) {
      int const e = a.ids[i];
      if (e >= 0 && e < E) {
        atomicAdd(&total[e], 1);
        if (i < flat_first) {
          atomicAdd(&before[e], 1);
        }
      }
    }
    __syncthreads();
    // This block's share of the count words goes to every rank: experts block, block + blocks, …; word E holds M.
    int const warp = tid / 32;
    for (int e = block + warp * blocks; e <= E; e += blocks * (kLowLatencyThreads / 32)) {
      int const count = e == E ? M : total[e];
      for (int r = lane; r < R; r += 32) {
        store_relaxed(at<std::uint64_t>(w, r, a.at.counts[a.parity]) + static_cast<std::size_t>(me) * a.at.count_stride + e,
                      comm::count_word(round, a.tag, static_cast<std::uint32_t>(count)));
      }
    }
    if (first < last) {
      if (tid < 32) {
        for (int c = 0; c < n_own; c += 32) {
          int const i = c + lane;
          int e = c == 0 ? early_id : i < n_own ? a.ids[flat_first + i] : -1;
          e = e < E ? e : -1;
          unsigned const same = __match_any_sync(0xffffffffU, e);
          int const rank_in_chunk = __popc(same & ((1U << lane) - 1U));
          int const start = e >= 0 ? before[e] : 0;
          __syncwarp();
          if (e >= 0 && rank_in_chunk == 0) {
            before[e] = start + __popc(same);
          }
          __syncwarp();
          if (i < n_own) {
            expert[i] = e;
            place[i] = start + rank_in_chunk;
            rank_of[i] = e >= 0 ? e / L : -1;
          }
        }
      }
      stage(first, row_base);
    }
    __syncthreads();

    // Where the rows of this rank begin in each batch: after those of all lower ranks.
    auto add_bases = [&] {
      for (int src = warp; src < me; src += kLowLatencyThreads / 32) {
        std::uint64_t const* const words = own_counts + static_cast<std::size_t>(src) * a.at.count_stride;
        for (int i = lane; i < n_own; i += 32) {
          if (int const e = expert[i]; e >= 0) {
            std::uint32_t count = 0;
            if (wait_count(w, words + e, round, a.tag, src, count)) {
              atomicAdd(&place[i], static_cast<int>(count));
            } else {
              failed = 1;
            }
          }
        }
      }
      __syncthreads();
    };
    // A row's address per choice; in the per-rank layout it is that of the token, for the first choice of each rank.
    auto set_targets = [&] {
      for (int i = tid; i < n_own; i += kLowLatencyThreads) {
        int const e = expert[i];
        int const dst = max(rank_of[i], 0);
        bool wanted = e >= 0;
        std::size_t index;
        if constexpr (kPerRank) {
          for (int j = i / K * K; j < i; ++j) {
            wanted = wanted && rank_of[j] != dst;
          }
          index = static_cast<std::size_t>(me) * a.max_tokens + t_first + i / K;
        } else {
          index = static_cast<std::size_t>(e - dst * L) * a.capacity + place[i];
        }
        row_target[i] = wanted ? w.peer[dst] + a.at.rows[a.parity] + index * a.at.row_bytes : nullptr;
        scale_target[i] = wanted ? w.peer[dst] + a.at.scales[a.parity] + index * (a.hidden / 32) : nullptr;
      }
      __syncthreads();
    };
    if constexpr (!kPerRank) {
      add_bases();
    }
    set_targets();

    bool const wide = (a.hidden / 128) % 4 == 0;  // scales of a row are whole 16-byte units
    for (int item = first; item < last && failed == 0; ++item) {
      unsigned char* const row = row_base + ((item - first) & 1) * row_stride;
      if (item != first) {
        stage(item, row);
        __syncthreads();
      }
      int const t = pieces.token(item);
      int const from = pieces.first_value(item);
      int const n = min(pieces.values, a.hidden - from);
      int const units = kFp8 ? n / 16 : n / 8;
      int const groups = n / 128;
      int const scale_units = !kFp8 ? 0 : wide ? groups / 4 : groups;
      char* const* const rows_of = row_target + (t - t_first) * K;
      char* const* const scales_of = scale_target + (t - t_first) * K;
      for (int u = tid; u < units + scale_units; u += kLowLatencyThreads) {
        if (u < units) {
          uint4 const v = reinterpret_cast<uint4 const*>(row)[u];
          std::size_t const offset = static_cast<std::size_t>(kFp8 ? from : 2 * from) + 16 * static_cast<std::size_t>(u);
#pragma unroll 8
          for (int j = 0; j < K; ++j) {
            if (char* const to = rows_of[j]; to != nullptr) {
              store_peer(reinterpret_cast<uint4*>(to + offset), v);
            }
          }
        } else {
          int const s = u - units;
          for (int j = 0; j < K; ++j) {
            if (char* const to = scales_of[j]; to != nullptr) {
              if (wide) {
                store_peer(reinterpret_cast<uint4*>(to + from / 32) + s, reinterpret_cast<uint4 const*>(row + n)[s]);
              } else {
                reinterpret_cast<std::uint32_t*>(to + from / 32)[s] = reinterpret_cast<std::uint32_t const*>(row + n)[s];
              }
            }
          }
        }
      }
    }
    if constexpr (kPerRank) {
      add_bases();
    }

    // Small words: the source of every row, the own places for combine, and in the per-rank layout what the local reduction needs.
    if (failed == 0) {
      std::int32_t* const sent_slots = own<std::int32_t>(w, a.at.sent_slots[a.parity]);
      for (int i = tid; i < n_own; i += kLowLatencyThreads) {
        int const t = t_first + i / K;
        if (first > t * pieces.per_token) {
          continue;  // another block has the token's first piece and writes these
        }
        int const e = expert[i];
        sent_slots[t * K + i % K] = e < 0 ? -1 : place[i];
        if (int const dst = rank_of[i]; dst >= 0) {
          at<std::int32_t>(w, dst, a.at.sources[a.parity])[static_cast<std::size_t>(e - dst * L) * a.capacity + place[i]] =
              me * a.max_tokens + t;
        }
      }
      if constexpr (kPerRank) {
        // One record per (token, rank), in 16-byte stores: the places of its choices there, then their weights.
        int const parts = (2 * K + 3) / 4;
        for (int i = tid; i < (t_last - t_first) * R * parts; i += kLowLatencyThreads) {
          int const part = i % parts;
          int const dst = i / parts % R;
          int const c = i / (parts * R) * K;
          int const t = t_first + c / K;
          if (first > t * pieces.per_token) {
            continue;
          }
          bool there = false;
          for (int j = 0; j < K; ++j) {
            there = there || rank_of[c + j] == dst;
          }
          if (!there) {
            continue;
          }
          std::uint32_t words[4];
          for (int k = 0; k < 4; ++k) {
            int const p = 4 * part + k;
            int const j = p < K ? p : min(p - K, K - 1);
            words[k] = p >= K ? __float_as_uint(a.weights[t * K + j])
                              : static_cast<std::uint32_t>(rank_of[c + j] == dst ? (expert[c + j] - dst * L) * a.capacity + place[c + j] : -1);
          }
          std::size_t const index = static_cast<std::size_t>(me) * a.max_tokens + t;
          std::uint32_t* const to = at<std::uint32_t>(w, dst, a.at.choices[a.parity]) + index * 2 * K + 4 * part;
          if (K % 2 == 0) {
            store_peer(reinterpret_cast<uint4*>(to), make_uint4(words[0], words[1], words[2], words[3]));
          } else {
            for (int k = 0; k < 4 && 4 * part + k < 2 * K; ++k) {
              to[k] = words[k];
            }
          }
          if (part == 0) {
            at<std::uint32_t>(w, dst, a.at.present[a.parity])[index] = round;
          }
        }
      }
    }
    __syncthreads();
    if (tid < R && failed == 0) {
      publish(at<std::uint32_t>(w, tid, a.at.arrive) + me * kMaxExchangeBlocks + block, round);
    }
  }

  if (a.receive) {
    // Block b waits for block b of every rank; when the kernel is over, all rows are there.
    if (tid < R) {
      wait_round(w, own<std::uint32_t>(w, a.at.arrive) + tid * kMaxExchangeBlocks + block, round, comm::ExchangePhase::dispatch_rows, tid);
    } else if (tid >= 64 && tid < 64 + 32) {
      for (int le = block; le < L; le += blocks) {
        int sum = 0;
        for (int s = lane; s < R; s += 32) {
          std::uint32_t count = 0;
          wait_count(w, own_counts + static_cast<std::size_t>(s) * a.at.count_stride + me * L + le, round, a.tag, s, count);
          sum += static_cast<int>(count);
        }
        sum = __reduce_add_sync(0xffffffffU, sum);
        if (lane == 0) {
          a.expert_num_tokens[le] = sum;
        }
      }
    }
  }
  // A failed wait leaves the rounds as consistent as a good one. Words of blocks that this launch lacks advance too.
  __syncthreads();
  if (tid == 0) {
    for (int b = block; b < kMaxExchangeBlocks; b += blocks) {
      if (a.send) {
        own<std::uint32_t>(w, a.at.sent)[b] = round;
        *own<std::uint32_t>(w, a.at.round_of[a.parity]) = round;
      }
      if (a.receive) {
        own<std::uint32_t>(w, a.at.received)[b] = round;
      }
    }
  }
}

}  // namespace moe::detail
