// SPDX-License-Identifier: Apache-2.0
// backends/collective/device/rounds.cuh: the kernels with which ranks agree on a round (one writes this rank's header, one checks all
// headers), and kernels that the exchanges over communicators share.
#pragma once

#include <algorithm>
#include <limits>

#include "moe/backends/collective/device/rounds.hpp"
#include "moe/backends/common/wire_row.hpp"
#include "moe/quantization/rows/quantize_row.cuh"

namespace moe::detail {

inline constexpr int kRoundThreads = 256;
inline constexpr int kRoundWarps = kRoundThreads / 32;
inline unsigned round_blocks(std::int64_t items, int per_block) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((items + per_block - 1) / per_block, 1, 1 << 20));
}

/// Writes the fixed words of this rank's header; one thread.
__device__ inline void write_header(RoundView const& v, RoundOpening const& o) {
  std::int64_t* const own = v.headers + v.rank * v.words;
  std::int64_t status = o.status;
  if (o.call == RoundCall::dispatch) {
    *v.rounds += 1;
    if (o.reports_pending && status == 0 && *v.pending != 0) {
      status = 1 + static_cast<std::int64_t>(ErrorCode::peer);
    }
    *v.pending = 0;
    *v.bad = 0;
  } else if (status == 0 && *v.bad != 0) {  // a combine fails with its dispatch; peers may not have seen the failure
    status = 1 + static_cast<std::int64_t>(ErrorCode::peer);
  }
  own[kTag] = o.tag;
  own[kRound] = *v.rounds;
  own[kCall] = static_cast<std::int64_t>(o.call);
  own[kStatus] = status;
  own[kRows] = o.rows;
}

template <class View>
__global__ void open_round(View const v, RoundOpening const o) {
  for (std::int64_t i = threadIdx.x; i < v.size * v.words; i += blockDim.x) {
    if (i / v.words != v.rank) {
      v.headers[i] = kAbsentWord;
    } else if (i % v.words >= kCounts) {
      v.headers[i] = 0;
    }
  }
  if (threadIdx.x == 0) {
    write_header(v, o);
  }
}

/// One block. Errors by priority: another layer, call or round; a rank that gave up or refused; too many rows for a rank.
template <class View>
__global__ void check_round_headers(View const v, RoundLayout layout, std::int64_t max_recv_rows, bool record) {
  __shared__ unsigned long long first;  // priority in the high word, rank in the low word: the smallest is the verdict
  auto const tid = static_cast<int>(threadIdx.x);
  auto const threads = static_cast<int>(blockDim.x);
  std::int64_t const* const own = v.headers + v.rank * v.words;
  constexpr unsigned long long kNone = ~0ULL;
  if (tid == 0) {
    first = kNone;
  }
  __syncthreads();
  for (int r = tid; r < v.size; r += threads) {
    std::int64_t const* const h = v.headers + r * v.words;
    unsigned long long rule = 0;
    for (HeaderWord w : {kTag, kCall, kRound}) {
      if (h[w] != own[w]) {
        atomicMin(&first, rule << 32 | static_cast<unsigned>(r));
        break;
      }
      ++rule;
    }
    if (h[kStatus] != 0) {
      atomicMin(&first, 3ULL << 32 | static_cast<unsigned>(r));
    }
  }
  __syncthreads();
  bool const dispatch = own[kCall] == static_cast<std::int64_t>(RoundCall::dispatch);
  bool const known = !dispatch && *v.bad != 0;  // the dispatch has failed and been recorded
  std::int64_t received = 0;                    // rows received from rank tid
  if (dispatch && first == kNone && layout == RoundLayout::by_counts) {
    for (int to = tid; to < v.size; to += threads) {
      received = 0;
      for (int from = 0; from < v.size; ++from) {
        received += v.headers[from * v.words + kCounts + to];
      }
      if (received > max_recv_rows) {
        atomicMin(&first, 4ULL << 32 | static_cast<unsigned>(to));
      }
    }
  }
  __syncthreads();
  unsigned long long const failure = first;
  if (dispatch && layout != RoundLayout::fixed) {
    for (int r = tid; r < v.size; r += threads) {
      std::int64_t in = 0;
      std::int64_t out = 0;
      for (int s = 0; failure == kNone && s < r; ++s) {
        in += layout == RoundLayout::by_rows ? v.headers[s * v.words + kRows] : v.headers[s * v.words + kCounts + v.rank];
        out += own[kCounts + s];
      }
      v.in_first[r] = in;
      v.out_first[r] = out;
    }
    for (std::int64_t i = tid; i < v.size * v.words; i += threads) {
      v.host_words[i] = v.headers[i];
    }
  }
  if (tid != 0 || failure == kNone) {
    return;
  }
  *v.bad = 1;
  if (dispatch && failure >> 32 < 2) {  // another layer or call: ranks in another call have not counted the round
    *v.rounds -= 1;
  }
  if (!record || known) {
    return;
  }
  *v.pending = dispatch ? 0 : 1;
  auto* const verdict = const_cast<RoundVerdict volatile*>(v.verdict);
  if (verdict->code != 0) {
    return;
  }
  int const rule = static_cast<int>(failure >> 32);
  int const r = static_cast<int>(failure & 0xffffffffU);
  std::int64_t const* const h = v.headers + r * v.words;
  std::int64_t const word = rule == 0 ? kTag : rule == 1 ? kCall : rule == 2 ? kRound : rule == 3 ? kStatus : kCounts;
  ErrorCode code = rule < 3 ? ErrorCode::mismatch : ErrorCode::capacity;
  if (rule == 3 && h[kStatus] != 1 + static_cast<std::int64_t>(ErrorCode::capacity)) {
    code = ErrorCode::peer;
  }
  std::int64_t found = rule < 4 ? h[word] : 0;
  for (int from = 0; rule == 4 && from < v.size; ++from) {
    found += v.headers[from * v.words + kCounts + r];
  }
  verdict->peer = r;
  verdict->word = word;
  verdict->call = own[kCall];
  verdict->round = own[kRound];
  verdict->expected = rule < 3 ? own[word] : max_recv_rows;
  verdict->found = found;
  __threadfence_system();
  verdict->code = 1 + static_cast<std::int32_t>(code);
}

template <class Comm>
void DeviceRounds<Comm>::open(RoundOpening const& opening, cudaStream_t stream) {
  open_round<<<1, kRoundThreads, 0, stream>>>(view_, opening);
  check_launch("open_round");
}
template <class Comm>
void DeviceRounds<Comm>::check_headers(RoundCall, bool record, cudaStream_t stream) {
  check_round_headers<<<1, kRoundThreads, 0, stream>>>(view_, layout_, max_recv_rows_, record);
  check_launch("check_round_headers");
}

/// The tokens that this rank packs into records, without their ids.
template <class Config, class Quant>
struct TokensToPack {
  Quant quant;
  WireRow<Config, Quant> wire;    ///< the layout of a record
  typename Config::Act const* x;  ///< device [rows, H]
  std::int64_t x_stride;          ///< elements between rows of x
  float const* weights;           ///< device [rows, k] top-k weights
  std::int64_t weights_stride;    ///< elements between rows of weights
  std::int64_t rows;              ///< M, tokens of this rank
};
template <class Config, class Quant>
TokensToPack<Config, Quant> tokens_to_pack(Quant const& quant, WireRow<Config, Quant> const& wire,
                                           RoutedTokens<typename Config::Act, Config::hidden> const& in, std::int64_t rows) {
  return {.quant = quant,
          .wire = wire,
          .x = in.hidden.data_handle(),
          .x_stride = in.hidden.stride(0),
          .weights = in.topk_weights.data_handle(),
          .weights_stride = in.topk_weights.stride(0),
          .rows = rows};
}

/// Writes token t into a record, except the ids, by one warp.
template <class Config, class Quant>
__device__ void pack_record(TokensToPack<Config, Quant> const& tokens, std::int64_t t, std::byte* record, int lane) {
  auto const& wire = tokens.wire;
  auto const* const x = tokens.x + t * tokens.x_stride;
  float const* const weights = tokens.weights + t * tokens.weights_stride;
  quantization::quantize_row_warp<Quant, typename Config::Act>(tokens.quant, x, wire.hidden(), wire.payload(record), wire.scales(record),
                                                               lane);
  for (std::int64_t j = lane; j < wire.topk(); j += 32) {
    wire.weights(record)[j] = weights[j];
  }
}

/// Where the partial sums of this rank's tokens lie, by rank.
template <class Partial>
struct PartialRows {
  Partial const* own;                ///< rows that this rank computed
  Partial const* others;             ///< rows that other ranks returned
  std::int32_t const* positions;     ///< [M, size] row among those of a rank, or -1: no expert there; null: row t everywhere
  std::int64_t const* own_first;     ///< device: first row in `own`, of each rank
  std::int64_t const* others_first;  ///< device: first row in `others`, of each rank; null: r M
};

/// out[t, c] = the sum over ranks, ascending, in float32, one rounding; NaN if the round failed. One thread per eight columns of a token.
template <class Act, class Partial>
__global__ void sum_partial_rows(RoundView const v, PartialRows<Partial> const p, std::int64_t rows, std::int64_t hidden, Act* out,
                                 std::int64_t stride) {
  constexpr int kWidth = 8;
  std::int64_t const chunks = (hidden + kWidth - 1) / kWidth;
  bool const bad = *v.bad != 0;
  bool const vector = hidden % kWidth == 0 && stride % kWidth == 0 && reinterpret_cast<std::uintptr_t>(out) % 16 == 0;
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * chunks; i += step) {
    std::int64_t const t = i / chunks;
    std::int64_t const c = i % chunks * kWidth;
    int const width = static_cast<int>(hidden - c < kWidth ? hidden - c : kWidth);
    float sum[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      sum[k] = bad ? __int_as_float(0x7fffffff) : 0.0F;
    }
    for (int r = 0; !bad && r < v.size; ++r) {
      std::int64_t const at = p.positions == nullptr ? t : p.positions[t * v.size + r];
      if (at < 0) {
        continue;
      }
      std::int64_t const first = r == v.rank ? p.own_first[r] : p.others_first != nullptr ? p.others_first[r] : r * rows;
      Partial const* const row = (r == v.rank ? p.own : p.others) + (first + at) * hidden + c;
      alignas(16) Partial raw[kWidth];
      if (vector) {
#pragma unroll
        for (int k = 0; k < static_cast<int>(sizeof raw / 16); ++k) {
          reinterpret_cast<uint4*>(raw)[k] = reinterpret_cast<uint4 const*>(row)[k];
        }
      } else {
        for (int k = 0; k < width; ++k) {
          raw[k] = row[k];
        }
      }
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        sum[k] += k < width ? to_float(raw[k]) : 0.0F;
      }
    }
    alignas(16) Act rounded[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      rounded[k] = from_float<Act>(sum[k]);
    }
    Act* const to = out + t * stride + c;
    if (vector) {
#pragma unroll
      for (int k = 0; k < static_cast<int>(sizeof rounded / 16); ++k) {
        reinterpret_cast<uint4*>(to)[k] = reinterpret_cast<uint4 const*>(rounded)[k];
      }
    } else {
      for (int k = 0; k < width; ++k) {
        to[k] = rounded[k];
      }
    }
  }
}
template <class Act, class Partial>
void launch_sum_partial_rows(RoundView const& v, PartialRows<Partial> const& p, std::int64_t rows, std::int64_t hidden, Act* out,
                             std::int64_t stride, cudaStream_t stream) {
  if (rows > 0) {
    sum_partial_rows<<<round_blocks(rows * ((hidden + 7) / 8), kRoundThreads), kRoundThreads, 0, stream>>>(v, p, rows, hidden, out, stride);
    check_launch("sum_partial_rows");
  }
}

}  // namespace moe::detail
