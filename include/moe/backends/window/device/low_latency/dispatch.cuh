// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/dispatch.cuh: rows quantised and stored into the owning peer's memory, with counts and arrival flags.
// Spec 04 §8.1.
//
// One kernel, no host, no barrier. Every rank tells every rank how many rows it has for each expert; from these counts each sender knows
// where its rows begin in every batch (sources in rank order, tokens in token order), so rows land packed and in a fixed order, without a
// copy on the receiving side. Two warps of each block work out places while the others quantise, so the counts travel meanwhile.
#pragma once

#include "moe/backends/window/device/common/rows.cuh"
#include "moe/backends/window/device/low_latency/layout.hpp"
#include "moe/comm/symmetric_memory.cuh"

namespace moe::detail {

inline constexpr int kLowLatencyThreads = 512;
inline constexpr int kPlanners = 64;  ///< threads that work out places and write the small words; the others move rows
inline constexpr int kMovers = kLowLatencyThreads - kPlanners;

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
  std::int32_t const* ids = nullptr;           ///< [M][k] global ids, -1: none
  std::int32_t const* expert_place = nullptr;  ///< [num_ids] where an id's expert is, rank * L + local; null: the id itself
  int num_ids = 0;
  bool weight_on_input = false;               ///< rows are multiplied with their weight first; k = 1
  bool masks = false;                         ///< skip masked ranks; rows at fixed places
  std::uint32_t refused = 0;                  ///< 1 + ErrorCode: this rank only tells its peers that it cannot take part
  float const* weights = nullptr;             ///< [M][k]; read in the per-rank layout and with weight_on_input
  std::int32_t* expert_num_tokens = nullptr;  ///< out [L]
  std::int64_t* expert_totals = nullptr;      ///< optional [L]: rows of all calls
};

/// Shared memory: own choices (target addresses), [E] counts before this block's tokens, [E] all counts, own choices (expert, place), two
/// rows.
inline std::size_t low_latency_dispatch_shared(LowLatencyShape const& s) {
  auto const own = static_cast<std::size_t>((s.max_tokens + s.blocks - 1) / s.blocks + 2) * static_cast<std::size_t>(s.topk);
  std::size_t const row =
      s.fp8 ? static_cast<std::size_t>(s.hidden) + 4 * static_cast<std::size_t>(s.groups()) : 2 * static_cast<std::size_t>(s.hidden);
  return (8 * static_cast<std::size_t>(s.num_experts) + 32 * own + 15) / 16 * 16 + 2 * ((row + 15) / 16 * 16);
}

template <bool kFp8, bool kPerRank>
__global__ void __launch_bounds__(kLowLatencyThreads, 1) low_latency_dispatch(LowLatencyDispatch const __grid_constant__ a) {
  using namespace comm::detail;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int failed;    // before a row is sent: places are not known
  __shared__ int unplaced;  // the same of the per-rank layout, whose rows do not wait for them
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
  int const groups = (a.hidden + 127) / 128;

  // Until the previous kernel is over, only what it cannot touch: the shared memory of this block.
  int const own_capacity = ((a.max_tokens + blocks - 1) / blocks + 2) * K;
  char** const row_target = reinterpret_cast<char**>(shared);  // of each own choice; null: nothing to store
  char** const scale_target = row_target + own_capacity;
  int* const before = reinterpret_cast<int*>(scale_target + own_capacity);  // [E] rows ahead of this block's tokens
  int* const total = before + E;                                            // [E] all rows of this rank
  int* const expert = total + E;
  int* const place = expert + own_capacity;
  int* const rank_of = place + own_capacity;
  int* const repeats = rank_of + own_capacity;  // 1: an earlier choice of the token has the same expert
  unsigned char* const row_base = shared + (8 * E + 32 * own_capacity + 15) / 16 * 16;
  if (a.send) {
#pragma unroll 1
    for (int e = tid; e < 2 * E; e += kLowLatencyThreads) {
      before[e] = 0;
    }
  }
  if (tid == 0) {
    failed = 0;
    unplaced = 0;
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
  std::uint64_t const masked = a.masks ? masked_ranks(w) : 0;
  __syncthreads();

  if (a.send) {
    unsigned const items = static_cast<unsigned>(M) * static_cast<unsigned>(pieces.per_token);
    int const first = static_cast<int>(items * static_cast<unsigned>(block) / static_cast<unsigned>(blocks));
    int const last = static_cast<int>(items * static_cast<unsigned>(block + 1) / static_cast<unsigned>(blocks));
    int const t_first = pieces.token(first);
    int const t_last = first == last ? t_first : pieces.token(last - 1) + 1;
    int const n_own = (t_last - t_first) * K;
    int const row_stride = ((kFp8 ? a.hidden + 4 * groups : 2 * a.hidden) + 15) / 16 * 16;

    // The first piece is on its way while places are worked out: 32 bytes a thread.
    int const mover = tid - kPlanners;
    uint4 early[2] = {};
    if (first < last && mover >= 0) {
      int const from = pieces.first_value(first);
      int const n = min(pieces.values, a.hidden - from);
      uint4 const* const x = reinterpret_cast<uint4 const*>(a.x + t_first * a.x_stride + from);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const u = kFp8 ? 2 * mover + i : mover + i * kMovers;
        early[i] = u < n / 8 ? x[u] : uint4{};
      }
    }
    int const flat_first = t_first * K;
    int const early_id = tid < 32 && tid < n_own ? a.ids[flat_first + tid] : -1;

    // Counts of all rows, and of the rows before this block's first token: places follow without atomics on memory, in token order.
#pragma unroll 2
    for (int chunk = tid - lane; chunk < M * K; chunk += kLowLatencyThreads) {
      int const i = chunk + lane;
      int const id = i < M * K ? a.ids[i] : -1;
      int const e = expert_of(id, a.expert_place, a.num_ids);
      if (distance_to_first(a.ids, i, id, K) == 0 && e >= 0) {
        atomicAdd(&total[e], 1);
        if (i < flat_first) {
          atomicAdd(&before[e], 1);
        }
      }
    }
    __syncthreads();

    // This block's share of the count words goes to every rank: experts block, block + blocks, …; word E holds M. The first warp has other
    // work, the rest takes a word each.
#pragma unroll 1
    for (int e = block + (tid / 32 - 1) * blocks; tid >= 32 && e <= E; e += blocks * (kLowLatencyThreads / 32 - 1)) {
      int const count = e == E ? M : total[e];
#pragma unroll 1
      for (int r = lane; r < R; r += 32) {
        if ((masked >> r) & 1U) {
          continue;
        }
        ptx::store_relaxed_system(at<std::uint64_t>(w, r, a.at.counts[a.parity]) + static_cast<std::size_t>(me) * a.at.count_stride + e,
                                  comm::count_word(round, a.tag, static_cast<std::uint32_t>(count)));
      }
    }
    // One lane per own choice: the rows of all lower ranks come first. False if they could not be learned.
    auto add_bases = [&] {
      bool known = true;
#pragma unroll 1
      for (int i = lane; i < n_own; i += 32) {
        if (int const e = expert[i]; e >= 0) {
          int const base = a.masks ? me * a.max_tokens : sum_counts(w, own_counts + e, a.at.count_stride, 0, me, round, a.tag);
          place[i] += max(base, 0);
          known = known && base >= 0;
        }
      }
      return __all_sync(0xffffffffU, known) != 0;
    };
    if (a.receive) {
      if (note_count_waits(w, own_counts + E, a.at.count_stride, round, a.tag)) {
        __syncthreads();
      }
    }
    bool const wide = a.hidden % 512 == 0;  // scales of a row are whole 16-byte units
    int item = first;
#pragma unroll 1
    do {
      unsigned char* const row = row_base + ((item - first) & 1) * row_stride;
      int const t = pieces.token(item);
      int const from = pieces.first_value(item);
      int const n = item < last ? min(pieces.values, a.hidden - from) : 0;
      if (mover >= 0) {
        uint4 const* const x = reinterpret_cast<uint4 const*>(a.x + t * a.x_stride + from);
        if constexpr (kFp8) {
          int const units = n / 16;
          float* const scales = reinterpret_cast<float*>(row + n);
#pragma unroll 1
          for (int u0 = mover - lane; u0 < units; u0 += kMovers) {
            int const u = u0 + lane;
            uint4 v[2] = {early[0], early[1]};
            if (item != first || u0 >= kMovers) {
              v[0] = u < units ? x[2 * u] : uint4{};
              v[1] = u < units ? x[2 * u + 1] : uint4{};
            }
            if (a.weight_on_input) {
              v[0] = weigh_eight(v[0], a.weights[t]);
              v[1] = weigh_eight(v[1], a.weights[t]);
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
#pragma unroll 1
          for (int u = mover; u < n / 8; u += kMovers) {
            uint4 const v = item != first || u >= 2 * kMovers ? x[u] : u < kMovers ? early[0] : early[1];
            reinterpret_cast<uint4*>(row)[u] = a.weight_on_input ? weigh_eight(v, a.weights[t]) : v;
          }
        }
      } else if (item == first && tid < 32) {
#pragma unroll 1
        for (int c = 0; c < n_own; c += 32) {
          int const i = c + lane;
          int const id = c == 0 ? early_id : i < n_own ? a.ids[flat_first + i] : -1;
          int const e = expert_of(id, a.expert_place, a.num_ids);
          int const in_token = distance_to_first(a.ids + flat_first, i, id, K);
          int const back = e >= 0 ? in_token : 0;
          int const counted = back == 0 ? e : -1;
          unsigned const same = __match_any_sync(0xffffffffU, counted);
          int const rank_in_chunk = __popc(same & ((1U << lane) - 1U));
          int const start = counted >= 0 ? before[e] : 0;
          __syncwarp();
          if (counted >= 0 && rank_in_chunk == 0) {
            before[e] = start + __popc(same);
          }
          if (i < n_own) {
            expert[i] = e;
            place[i] = start + rank_in_chunk;
            rank_of[i] = e >= 0 ? e / L : -1;
            repeats[i] = back != 0 ? 1 : 0;
          }
          __syncwarp();
          if (back != 0) {
            place[i] = place[i - back];
          }
          __syncwarp();
        }
        if constexpr (!kPerRank) {
          if (!add_bases() && lane == 0) {
            failed = 1;
          }
        }
        // A row's address per choice; in the per-rank layout it is that of the token, for the first choice of each rank.
#pragma unroll 1
        for (int i = lane; i < n_own; i += 32) {
          int const e = expert[i];
          int const dst = max(rank_of[i], 0);
          bool wanted = e >= 0 && repeats[i] == 0 && ((masked >> dst) & 1U) == 0;
          std::size_t index;
          if constexpr (kPerRank) {
            int const token = i / K;
#pragma unroll 1
            for (int j = token * K; j < i; ++j) {
              wanted = wanted && rank_of[j] != dst;
            }
            index = static_cast<std::size_t>(me) * a.max_tokens + t_first + token;
          } else {
            index = static_cast<std::size_t>(e - dst * L) * a.capacity + place[i];
          }
          row_target[i] = wanted ? w.peer[dst] + a.at.rows[a.parity] + index * a.at.row_bytes : nullptr;
          scale_target[i] = wanted ? w.peer[dst] + a.at.scales[a.parity] + index * (4 * groups) : nullptr;
        }
      }
      __syncthreads();
      if (failed != 0) {
        break;
      }
      if (mover >= 0) {
        char* const* const rows_of = row_target + (t - t_first) * K;
#pragma unroll 1
        for (int u = mover; u < (kFp8 ? n / 16 : n / 8); u += kMovers) {
          uint4 const v = reinterpret_cast<uint4 const*>(row)[u];
          std::size_t const offset = static_cast<std::size_t>(kFp8 ? from : 2 * from) + 16 * static_cast<std::size_t>(u);
#pragma unroll 1
          for (int j0 = 0; j0 < K; j0 += 8) {
            char* to[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              to[j] = j0 + j < K ? rows_of[j0 + j] : nullptr;
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
              if (to[j] != nullptr) {
                store_peer(reinterpret_cast<uint4*>(to[j] + offset), v);
              }
            }
          }
        }
      } else if (kFp8 && tid >= 32) {
        char* const* const scales_of = scale_target + (t - t_first) * K;
#pragma unroll 1
        for (int s = lane; s < (wide ? n / 512 : (n + 127) / 128); s += 32) {
#pragma unroll 1
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
    } while (++item < last);

    // Small words, while the rows are on their way: the source of every row, the own places for combine, and in the per-rank layout what
    // the local reduction needs. A token that several blocks share is the matter of the block that has its first piece.
    if (tid < 32 && first < last && failed == 0) {
      bool known = true;
      if constexpr (kPerRank) {
        known = add_bases();
        if (!known && lane == 0) {
          unplaced = 1;
        }
      }
      int const t_words = pieces.first_value(first) == 0 ? t_first : t_first + 1;
      std::int32_t* const sent_slots = own<std::int32_t>(w, a.at.sent_slots[a.parity]);
#pragma unroll 1
      for (int i = (t_words - t_first) * K + lane; known && i < n_own; i += 32) {
        int const dst = rank_of[i];
        sent_slots[flat_first + i] = dst < 0 ? -1 : place[i];
        if (dst >= 0 && ((masked >> dst) & 1U) == 0) {
          at<std::int32_t>(w, dst, a.at.sources[a.parity])[static_cast<std::size_t>(expert[i] - dst * L) * a.capacity + place[i]] =
              me * a.max_tokens + t_first + i / K;
        }
      }
      if constexpr (kPerRank) {
        // One record per (token, rank): the places of its choices there, then their weights.
#pragma unroll 1
        for (int t = t_words; known && t < t_last; ++t) {
          int const c = (t - t_first) * K;
          std::uint32_t const weight = lane < K ? __float_as_uint(a.weights[t * K + lane]) : 0;
          int const my_rank = lane < K ? rank_of[c + lane] : -1;
          std::uint32_t const my_place =
              my_rank >= 0 ? static_cast<std::uint32_t>((expert[c + lane] - my_rank * L) * a.capacity + place[c + lane]) : 0;
          std::size_t const index = static_cast<std::size_t>(me) * a.max_tokens + t;
#pragma unroll 1
          for (int dst = 0; dst < R; ++dst) {
            if (!__any_sync(0xffffffffU, my_rank == dst)) {
              continue;
            }
            std::uint32_t* const to = at<std::uint32_t>(w, dst, a.at.choices[a.parity]) + index * 2 * K;
            if (lane < K) {
              to[lane] = my_rank == dst ? my_place : 0xffffffffU;
              to[K + lane] = weight;
            }
            if (lane == 0) {
              at<std::uint32_t>(w, dst, a.at.present[a.parity])[index] = round;
            }
          }
        }
      }
    }
    __syncthreads();
    if (tid < R && failed == 0 && unplaced == 0 && ((masked >> tid) & 1U) == 0) {
      if (a.refused != 0 && block == 0) {
        refuse(w, tid, round, a.refused);
      }
      publish(at<std::uint32_t>(w, tid, a.at.arrive) + me * kMaxExchangeBlocks + block, round);
    }
  }

  if (a.receive) {
    if (!a.send) {
      if (note_count_waits(w, own_counts + E, a.at.count_stride, round, a.tag)) {
        __syncthreads();
      }
    }
    // Block b waits for block b of every rank; when the kernel is over, all rows are there.
    if (tid < R) {
      if (wait_round(w, own<std::uint32_t>(w, a.at.arrive) + tid * kMaxExchangeBlocks + block, round, comm::ExchangePhase::dispatch_rows,
                     tid) &&
          block == 0) {
        check_refusal(w, comm::ExchangePhase::dispatch_rows, tid, round);
      }
    } else if (tid >= 64 && tid < 64 + 32) {
#pragma unroll 1
      for (int le = block + lane * blocks; le < L; le += 32 * blocks) {
        int const rows = max(sum_counts(w, own_counts + me * L + le, a.at.count_stride, 0, R, round, a.tag), 0);
        a.expert_num_tokens[le] = rows;
        if (a.expert_totals != nullptr) {
          a.expert_totals[le] += rows;
        }
      }
    }
  }
  // A failed wait leaves the rounds as consistent as a good one. Words of blocks that this launch lacks advance too.
  __syncthreads();
  if (tid == 0) {
#pragma unroll 1
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
