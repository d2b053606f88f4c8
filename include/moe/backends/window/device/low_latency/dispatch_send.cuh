// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/dispatch_send.cuh: the sending half of a low-latency dispatch, one function per warp role.
// docs/semantics/exchange.md §8.1.
//
// Warps 0 and 1 are planners: warp 0 computes where this block's rows go and writes the small words, warp 1 stores scales. Warps 2-15 are
// movers: they quantise rows into shared memory and store them to the peers. Before the row positions are needed all warps count.
#pragma once

#include "moe/backends/window/device/common/rows.cuh"
#include "moe/backends/window/device/low_latency/params.hpp"

namespace moe::detail {

/// The functions below take it, or a type that hides sizes by constants (fixed.cuh).
struct LowLatencyDispatch : LowLatencyKernelParams {
  ExchangeTokens in;
  LowLatencyPieces pieces;  ///< pieces of in.tokens, computed once so that a call without splitting needs no division
  ScaleRule scales;
  int parity = 0;
  bool send = true;
  bool receive = true;
  std::uint32_t refused = 0;                  ///< 1 + ErrorCode: this rank only tells its peers that it cannot take part
  std::int32_t* expert_num_tokens = nullptr;  ///< out [L]
  std::int64_t* expert_totals = nullptr;      ///< optional [L]: rows of all calls
};

/// State that the warps of a block share.
struct LowLatencyFlags {
  int failed;       ///< a wait for counts failed; no row was sent
  int failed_late;  ///< per-rank layout: the same, but after rows were sent, because they do not wait for the row positions
};

/// Shared memory: two target addresses for each choice of this block, [E] rows before this block's tokens, [E] all rows, expert, row
/// position, rank and repeat mark of each choice, then two rows.
inline std::size_t low_latency_dispatch_shared(LowLatencyShape const& s) {
  auto const own = static_cast<std::size_t>((s.max_tokens + s.blocks - 1) / s.blocks + 2) * static_cast<std::size_t>(s.topk);
  std::size_t const row =
      s.fp8 ? static_cast<std::size_t>(s.hidden) + 4 * static_cast<std::size_t>(s.groups()) : 2 * static_cast<std::size_t>(s.hidden);
  return (8 * static_cast<std::size_t>(s.num_experts) + 32 * own + 15) / 16 * 16 + 2 * ((row + 15) / 16 * 16);
}
struct LowLatencyTables {
  char** row_target;    ///< of each choice of this block; null: nothing to store
  char** scale_target;  ///< the same
  int* before;          ///< [E] rows before this block's tokens
  int* total;           ///< [E] all rows of this rank
  int* expert;          ///< of each choice of this block: rank * L + local, or -1
  int* position;        ///< of each choice of this block: row position in its expert's batch
  int* rank_of;         ///< of each choice of this block, or -1
  int* repeats;         ///< of each choice of this block: 1: an earlier choice of the token has the same expert
  unsigned char* rows;  ///< two rows

  template <class Args>
  __device__ LowLatencyTables(Args const& a, unsigned char* shared) {
    int const blocks = static_cast<int>(gridDim.x);
    int const E = a.num_experts;
    int const own_capacity = ((a.max_tokens + blocks - 1) / blocks + 2) * a.topk;
    row_target = reinterpret_cast<char**>(shared);
    scale_target = row_target + own_capacity;
    before = reinterpret_cast<int*>(scale_target + own_capacity);
    total = before + E;
    expert = total + E;
    position = expert + own_capacity;
    rank_of = position + own_capacity;
    repeats = rank_of + own_capacity;
    rows = shared + (8 * E + 32 * own_capacity + 15) / 16 * 16;
  }
};

/// Values of this call that all threads of a block share.
struct LowLatencyCall {
  std::uint32_t round;
  std::uint64_t masked;  ///< a bit for each masked rank
  LowLatencyPieces pieces;
};

/// This block's share: pieces [first, last), which belong to the tokens [t_first, t_last).
struct LowLatencyShare {
  int first, last, t_first, t_last;
  int choices;  ///< number of choices of these tokens
  __device__ LowLatencyShare(LowLatencyPieces const& pieces, int topk) {
    unsigned const items = static_cast<unsigned>(pieces.tokens) * static_cast<unsigned>(pieces.per_token);
    first = static_cast<int>(items * blockIdx.x / gridDim.x);
    last = static_cast<int>(items * (blockIdx.x + 1) / gridDim.x);
    t_first = pieces.token(first);
    t_last = first == last ? t_first : pieces.token(last - 1) + 1;
    choices = (t_last - t_first) * topk;
  }
};

/// Movers: load the first piece while row positions are computed: 32 bytes per thread.
template <bool kFp8, class Args>
__device__ inline void load_first_piece(Args const& a, LowLatencyCall const& call, LowLatencyShare const& own, uint4 (&early)[2]) {
  int const mover = static_cast<int>(threadIdx.x) - kPlanners;
  if (own.first >= own.last || mover < 0) {
    return;
  }
  int const from = call.pieces.first_value(own.first);
  int const n = min(call.pieces.values, a.hidden - from);
  uint4 const* const x = reinterpret_cast<uint4 const*>(a.in.x + own.t_first * a.in.x_stride + from);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int const u = kFp8 ? 2 * mover + i : mover + i * kMovers;
    early[i] = u < n / 8 ? x[u] : uint4{};
  }
}

/// All warps: count all rows, and the rows before this block's first token. Row positions follow in token order, without atomics on global
/// memory.
template <class Args>
__device__ inline void count_choices(Args const& a, LowLatencyCall const& call, LowLatencyShare const& own,
                                     LowLatencyTables const& shared) {
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  int const all = call.pieces.tokens * a.topk;
#pragma unroll 2
  for (int chunk = tid - lane; chunk < all; chunk += kLowLatencyThreads) {
    int const i = chunk + lane;
    int const id = i < all ? a.in.ids[i] : -1;
    int const e = expert_of(id, a.experts);
    if (distance_to_first(a.in.ids, i, id, a.topk) == 0 && e >= 0) {
      atomicAdd(&shared.total[e], 1);
      if (i < own.t_first * a.topk) {
        atomicAdd(&shared.before[e], 1);
      }
    }
  }
}

/// All warps but the first, after all have counted: send this block's share of the count words to every rank: experts block, block +
/// blocks, …; word E holds the number of tokens. One word per warp.
template <class Args>
__device__ inline void send_counts(Args const& a, LowLatencyCall const& call, LowLatencyTables const& shared) {
  comm::WindowView const& w = a.window;
  int const tid = static_cast<int>(threadIdx.x);
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
#pragma unroll 1
  for (int e = block + (tid / 32 - 1) * blocks; tid >= 32 && e <= a.num_experts; e += blocks * (kLowLatencyThreads / 32 - 1)) {
    int const count = e == a.num_experts ? call.pieces.tokens : shared.total[e];
#pragma unroll 1
    for (int r = tid % 32; r < w.size; r += 32) {
      if ((call.masked >> r) & 1U) {
        continue;
      }
      ptx::store_relaxed_system(
          comm::detail::at<std::uint64_t>(w, r, a.at.counts[a.parity]) + static_cast<std::size_t>(w.rank) * a.at.count_stride + e,
          comm::count_word(call.round, a.tag, static_cast<std::uint32_t>(count)));
    }
  }
}

/// Movers: write one piece of token t, in wire format, into `row` of shared memory. `early`: the piece, if it is the block's first.
template <bool kFp8, class Args>
__device__ inline void fill_row(Args const& a, int t, int from, int values, bool is_first, uint4 const (&early)[2], unsigned char* row) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const mover = static_cast<int>(threadIdx.x) - kPlanners;
  uint4 const* const x = reinterpret_cast<uint4 const*>(a.in.x + t * a.in.x_stride + from);
  if constexpr (kFp8) {
    int const sixteens = values / 16;
    float* const scales = reinterpret_cast<float*>(row + values);
#pragma unroll 1
    for (int u0 = mover - lane; u0 < sixteens; u0 += kMovers) {
      int const u = u0 + lane;
      uint4 v[2] = {early[0], early[1]};
      if (!is_first || u0 >= kMovers) {
        v[0] = u < sixteens ? x[2 * u] : uint4{};
        v[1] = u < sixteens ? x[2 * u + 1] : uint4{};
      }
      if (a.weight_on_input) {
        v[0] = weigh_eight(v[0], a.in.weights[t]);
        v[1] = weigh_eight(v[1], a.in.weights[t]);
      }
      float scale;
      uint4 const codes = quantize_sixteen(v, a.scales.amax_floor, a.scales.pow2, scale);
      if (u < sixteens) {
        reinterpret_cast<uint4*>(row)[u] = codes;
        if (u % 8 == 0) {
          scales[u / 8] = scale;
        }
      }
    }
  } else {
#pragma unroll 1
    for (int u = mover; u < values / 8; u += kMovers) {
      uint4 const v = !is_first || u >= 2 * kMovers ? x[u] : u < kMovers ? early[0] : early[1];
      reinterpret_cast<uint4*>(row)[u] = a.weight_on_input ? weigh_eight(v, a.in.weights[t]) : v;
    }
  }
}

/// The first warp, one lane per choice of this block: adds the rows of all lower ranks to the row positions. Waits for their counts, unless
/// ranks may be dead. False if a wait failed.
template <class Args>
__device__ inline bool add_bases(Args const& a, LowLatencyCall const& call, LowLatencyShare const& own, LowLatencyTables const& shared) {
  comm::WindowView const& w = a.window;
  std::uint64_t const* const counts = comm::detail::own<std::uint64_t>(w, a.at.counts[a.parity]);
  bool known = true;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % 32; i < own.choices; i += 32) {
    if (int const e = shared.expert[i]; e >= 0) {
      int const base =
          a.masks ? w.rank * a.max_tokens : comm::detail::sum_counts(w, counts + e, a.at.count_stride, 0, w.rank, call.round, a.tag);
      shared.position[i] += max(base, 0);
      known = known && base >= 0;
    }
  }
  return __all_sync(0xffffffffU, known) != 0;
}

/// The first warp, while the movers fill the first row: the expert and row position of each choice of this block. `early_id`: the lane's
/// first id.
template <class Args>
__device__ inline void find_positions(Args const& a, LowLatencyShare const& own, LowLatencyTables const& shared, int early_id) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  std::int32_t const* const ids = a.in.ids + own.t_first * a.topk;
#pragma unroll 1
  for (int c = 0; c < own.choices; c += 32) {
    int const i = c + lane;
    int const id = c == 0 ? early_id : i < own.choices ? ids[i] : -1;
    int const e = expert_of(id, a.experts);
    int const in_token = distance_to_first(ids, i, id, a.topk);
    int const back = e >= 0 ? in_token : 0;
    int const counted = back == 0 ? e : -1;
    unsigned const same = __match_any_sync(0xffffffffU, counted);
    int const rank_in_chunk = __popc(same & ((1U << lane) - 1U));
    int const start = counted >= 0 ? shared.before[e] : 0;
    __syncwarp();

    if (counted >= 0 && rank_in_chunk == 0) {
      shared.before[e] = start + __popc(same);
    }
    if (i < own.choices) {
      shared.expert[i] = e;
      shared.position[i] = start + rank_in_chunk;
      shared.rank_of[i] = e >= 0 ? e / a.local_experts : -1;
      shared.repeats[i] = back != 0 ? 1 : 0;
    }
    __syncwarp();

    if (back != 0) {
      shared.position[i] = shared.position[i - back];
    }
    __syncwarp();
  }
}

/// The first warp, before the block synchronises: one row address per choice; in the per-rank layout the token's row address, for the first
/// choice of each rank.
template <bool kPerRank, class Args>
__device__ inline void find_targets(Args const& a, LowLatencyCall const& call, LowLatencyShare const& own, LowLatencyTables const& shared) {
  comm::WindowView const& w = a.window;
  int const groups = (a.hidden + 127) / 128;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % 32; i < own.choices; i += 32) {
    int const e = shared.expert[i];
    int const dst = max(shared.rank_of[i], 0);
    bool wanted = e >= 0 && shared.repeats[i] == 0 && ((call.masked >> dst) & 1U) == 0;
    std::size_t index;
    if constexpr (kPerRank) {
      int const token = i / a.topk;
#pragma unroll 1
      for (int j = token * a.topk; j < i; ++j) {
        wanted = wanted && shared.rank_of[j] != dst;
      }
      index = static_cast<std::size_t>(w.rank) * a.max_tokens + own.t_first + token;
    } else {
      index = static_cast<std::size_t>(e - dst * a.local_experts) * a.capacity + shared.position[i];
    }
    shared.row_target[i] = wanted ? w.peer[dst] + a.at.rows[a.parity] + index * a.at.row_bytes : nullptr;
    shared.scale_target[i] = wanted ? w.peer[dst] + a.at.scales[a.parity] + index * (4 * groups) : nullptr;
  }
}

/// Movers, after the block has synchronised: store a piece from shared memory to all its destinations. `targets`: [k] of the token.
template <bool kFp8>
__device__ inline void store_row(unsigned char const* row, int from, int values, char* const* targets, int topk) {
#pragma unroll 1
  for (int u = static_cast<int>(threadIdx.x) - kPlanners; u < (kFp8 ? values / 16 : values / 8); u += kMovers) {
    uint4 const v = reinterpret_cast<uint4 const*>(row)[u];
    std::size_t const offset = static_cast<std::size_t>(kFp8 ? from : 2 * from) + 16 * static_cast<std::size_t>(u);
#pragma unroll 1
    for (int j0 = 0; j0 < topk; j0 += 8) {
      char* to[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        to[j] = j0 + j < topk ? targets[j0 + j] : nullptr;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (to[j] != nullptr) {
          comm::detail::store_peer(reinterpret_cast<uint4*>(to[j] + offset), v);
        }
      }
    }
  }
}

/// The second warp, after the block has synchronised: stores the scales of the piece, which lie behind its values. `wide`: whole 16-byte
/// vectors.
__device__ inline void store_scales(unsigned char const* row, int from, int values, char* const* targets, int topk, bool wide) {
#pragma unroll 1
  for (int s = static_cast<int>(threadIdx.x) % 32; s < (wide ? values / 512 : (values + 127) / 128); s += 32) {
#pragma unroll 1
    for (int j = 0; j < topk; ++j) {
      if (char* const to = targets[j]; to != nullptr) {
        if (wide) {
          comm::detail::store_peer(reinterpret_cast<uint4*>(to + from / 32) + s, reinterpret_cast<uint4 const*>(row + values)[s]);
        } else {
          reinterpret_cast<std::uint32_t*>(to + from / 32)[s] = reinterpret_cast<std::uint32_t const*>(row + values)[s];
        }
      }
    }
  }
}

/// The first warp, per-rank layout: one choice record per (token, rank): the row positions of its choices there, then their weights.
template <class Args>
__device__ inline void write_records(Args const& a, LowLatencyCall const& call, LowLatencyShare const& own, LowLatencyTables const& shared,
                                     int t_words) {
  comm::WindowView const& w = a.window;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const K = a.topk;
#pragma unroll 1
  for (int t = t_words; t < own.t_last; ++t) {
    int const c = (t - own.t_first) * K;
    std::uint32_t const weight = lane < K ? __float_as_uint(a.in.weights[t * K + lane]) : 0;
    int const my_rank = lane < K ? shared.rank_of[c + lane] : -1;
    std::uint32_t const my_position =
        my_rank >= 0
            ? static_cast<std::uint32_t>((shared.expert[c + lane] - my_rank * a.local_experts) * a.capacity + shared.position[c + lane])
            : 0;
    std::size_t const index = static_cast<std::size_t>(w.rank) * a.max_tokens + t;
#pragma unroll 1
    for (int dst = 0; dst < w.size; ++dst) {
      if (!__any_sync(0xffffffffU, my_rank == dst)) {
        continue;
      }
      std::uint32_t* const to = comm::detail::at<std::uint32_t>(w, dst, a.at.choices[a.parity]) + index * 2 * K;
      if (lane < K) {
        to[lane] = my_rank == dst ? my_position : 0xffffffffU;
        to[K + lane] = weight;
      }
      if (lane == 0) {
        comm::detail::at<std::uint32_t>(w, dst, a.at.present[a.parity])[index] = call.round;
      }
    }
  }
}

/// The first warp, while the rows are in flight: the source of every row, this rank's row positions for combine, and in the per-rank layout
/// the choice records for the local reduction, for which it waits for the counts of lower ranks. If several blocks share a token, the block
/// with its first piece writes its words.
template <bool kPerRank, class Args>
__device__ inline void write_small_words(Args const& a, LowLatencyCall const& call, LowLatencyShare const& own,
                                         LowLatencyTables const& shared, LowLatencyFlags& flags) {
  comm::WindowView const& w = a.window;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  bool known = true;
  if constexpr (kPerRank) {
    known = add_bases(a, call, own, shared);
    if (!known && lane == 0) {
      flags.failed_late = 1;
    }
  }
  if (!known) {
    return;
  }

  int const t_words = call.pieces.first_value(own.first) == 0 ? own.t_first : own.t_first + 1;
  std::int32_t* const sent_positions = comm::detail::own<std::int32_t>(w, a.at.sent_positions[a.parity]);
#pragma unroll 1
  for (int i = (t_words - own.t_first) * a.topk + lane; i < own.choices; i += 32) {
    int const dst = shared.rank_of[i];
    sent_positions[own.t_first * a.topk + i] = dst < 0 ? -1 : shared.position[i];
    if (dst >= 0 && ((call.masked >> dst) & 1U) == 0) {
      std::int32_t* const sources = comm::detail::at<std::int32_t>(w, dst, a.at.sources[a.parity]);
      sources[static_cast<std::size_t>(shared.expert[i] - dst * a.local_experts) * a.capacity + shared.position[i]] =
          w.rank * a.max_tokens + own.t_first + i / a.topk;
    }
  }
  if constexpr (kPerRank) {
    write_records(a, call, own, shared, t_words);
  }
}

/// One thread per rank, after all rows and words of the block are stored: tells the rank that they have arrived.
template <class Args>
__device__ inline void publish_rows(Args const& a, LowLatencyCall const& call, LowLatencyFlags const& flags) {
  comm::WindowView const& w = a.window;
  int const r = static_cast<int>(threadIdx.x);
  if (r < w.size && flags.failed == 0 && flags.failed_late == 0 && ((call.masked >> r) & 1U) == 0) {
    if (a.refused != 0 && blockIdx.x == 0) {
      comm::detail::refuse(w, r, call.round, a.refused);
    }
    comm::detail::publish(comm::detail::at<std::uint32_t>(w, r, a.at.arrive) + w.rank * kMaxExchangeBlocks + blockIdx.x, call.round);
  }
}

}  // namespace moe::detail
