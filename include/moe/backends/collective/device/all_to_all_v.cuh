// SPDX-License-Identifier: Apache-2.0
// backends/collective/device/all_to_all_v.cuh: the kernels of AllToAllV on the device: destinations of tokens, records, rows without a
// token.
#pragma once

#include "moe/backends/collective/device/all_to_all_v.hpp"
#include "moe/backends/collective/device/rounds.cuh"

namespace moe::backends::detail {

inline constexpr int kPlanThreads = 512;

/// Parameters of the kernels of one exchange. Device addresses.
struct RouteTable {
  std::int32_t const* ids;  ///< [M, k]
  std::int64_t stride;
  std::int64_t topk;
  std::int32_t const* owner;  ///< [P]
  std::int32_t const* local;  ///< [P]
  int num_physical;

  __device__ bool goes_to(std::int64_t t, int rank) const {
    for (std::int64_t j = 0; j < topk; ++j) {
      std::int32_t const id = ids[t * stride + j];
      if (id >= 0 && id < num_physical && owner[id] == rank) {
        return true;
      }
    }
    return false;
  }
};

/// Block r: writes positions[t, r] of the tokens for rank r, in token order, and their count into this rank's header; marks rank r's header
/// absent.
template <class View>
__global__ void __launch_bounds__(kPlanThreads)
    plan_routes(View const v, moe::detail::RoundOpening const o, RouteTable const table, std::int64_t rows, std::int32_t* positions) {
  __shared__ int warp_counts[kPlanThreads / 32];
  int const tid = static_cast<int>(threadIdx.x);
  int const lane = tid % 32;
  for (int r = static_cast<int>(blockIdx.x); r < v.size; r += static_cast<int>(gridDim.x)) {
    int total = 0;
    for (std::int64_t base = 0; base < rows; base += kPlanThreads) {
      std::int64_t const t = base + tid;
      bool const here = t < rows && table.goes_to(t, r);
      unsigned const mask = __ballot_sync(0xffffffffU, here);
      if (lane == 0) {
        warp_counts[tid / 32] = __popc(mask);
      }
      __syncthreads();
      int before = total + __popc(mask & ((1U << lane) - 1U));
      for (int w = 0; w < kPlanThreads / 32; ++w) {
        before += w < tid / 32 ? warp_counts[w] : 0;
        total += warp_counts[w];
      }
      if (t < rows) {
        positions[t * v.size + r] = here ? before : -1;
      }
      __syncthreads();
    }
    if (r != v.rank) {
      for (std::int64_t i = tid; i < v.words; i += kPlanThreads) {
        v.headers[r * v.words + i] = moe::detail::kAbsentWord;
      }
    }
    if (tid == 0) {
      v.headers[v.rank * v.words + moe::detail::kCounts + r] = total;
      if (r == v.rank) {
        moe::detail::write_header(v, o);
      }
    }
  }
}

/// Parameters of pack_routes.
template <class Config, class Quant>
struct PackRoutesArgs {
  moe::detail::RoundView round;
  moe::detail::TokensToPack<Config, Quant> tokens;
  RouteTable table;
  std::int32_t const* positions;  ///< device [M, size] record of a token among those for a rank, or -1
  std::byte* sent;                ///< device: records for other ranks, by rank
  std::byte* received;            ///< device: records from all ranks, by rank; this rank's own are written here
  int ranks_per_warp;             ///< 1 or size
};

/// Writes the record of a token for each rank that has an expert for it. One warp serves `ranks_per_warp` ranks of a token: it quantises
/// the row for the first of them and copies it for the others.
template <class Config, class Quant>
__global__ void __launch_bounds__(moe::detail::kRoundThreads) pack_routes(PackRoutesArgs<Config, Quant> const a) {
  moe::detail::RoundView const& v = a.round;
  auto const& wire = a.tokens.wire;
  RouteTable const& table = a.table;
  if (*v.bad != 0) {
    return;
  }
  int const lane = static_cast<int>(threadIdx.x) % 32;
  std::int64_t const parts = (v.size + a.ranks_per_warp - 1) / a.ranks_per_warp;
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * moe::detail::kRoundWarps;
  std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * moe::detail::kRoundWarps + static_cast<int>(threadIdx.x) / 32;
  for (; i < a.tokens.rows * parts; i += step) {
    std::int64_t const t = i / parts;
    std::byte const* packed = nullptr;
    for (int r = static_cast<int>(i % parts) * a.ranks_per_warp, end = min(v.size, r + a.ranks_per_warp); r < end; ++r) {
      std::int32_t const at = a.positions[t * v.size + r];
      if (at < 0) {
        continue;
      }
      std::byte* const record =
          (r == v.rank ? a.received + v.in_first[r] * wire.bytes() : a.sent + v.out_first[r] * wire.bytes()) + at * wire.bytes();
      if (packed == nullptr) {
        moe::detail::pack_record(a.tokens, t, record, lane);
        __syncwarp();
      } else {
        for (std::int64_t b = lane; b < wire.bytes() / 16; b += 32) {
          reinterpret_cast<uint4*>(record)[b] = reinterpret_cast<uint4 const*>(packed)[b];
        }
        __syncwarp();
      }
      packed = record;
      for (std::int64_t j = lane; j < table.topk; j += 32) {
        std::int32_t const id = table.ids[t * table.stride + j];
        bool const here = id >= 0 && id < table.num_physical && table.owner[id] == r;
        wire.ids(record)[j] = here ? table.local[id] : kNoExpert;
      }
      __syncwarp();
    }
  }
}

/// Fixed sizes: rows past the count of a rank, or all rows of a round that failed, have no expert.
template <class Wire>
__global__ void hide_rows(moe::detail::RoundView const v, Wire const wire, std::int64_t max_tokens, std::byte* received) {
  bool const bad = *v.bad != 0;
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < v.size * max_tokens; i += step) {
    std::int64_t const r = i / max_tokens;
    if (bad || i % max_tokens >= v.headers[r * v.words + moe::detail::kCounts + v.rank]) {
      for (std::int64_t j = 0; j < wire.topk(); ++j) {
        wire.ids(received + i * wire.bytes())[j] = kNoExpert;
      }
    }
  }
}

template <class Comm, class Config, class Quant, class Partial>
void AllToAllVExchange<Comm, Config, Quant, Partial, space::cuda>::launch_plan(Rows<std::int32_t const> ids,
                                                                               moe::detail::RoundOpening const& opening,
                                                                               cudaStream_t stream) {
  RouteTable const table{
      .ids = ids.data_handle(), .stride = ids.stride(0), .topk = topk_, .owner = owner_, .local = local_, .num_physical = num_physical_};
  plan_routes<<<static_cast<unsigned>(rounds_.size()), kPlanThreads, 0, stream>>>(rounds_.view(), opening, table, own_rows_, positions_);
  check_launch("plan_routes");
}

template <class Comm, class Config, class Quant, class Partial>
void AllToAllVExchange<Comm, Config, Quant, Partial, space::cuda>::launch_pack(RoutedTokens<Act, Config::hidden> const& in,
                                                                               cudaStream_t stream) {
  if (own_rows_ == 0) {
    return;
  }
  constexpr std::int64_t kManyTokens = 2048;  // enough to keep every multiprocessor busy with one warp each
  int const ranks_per_warp = own_rows_ >= kManyTokens ? rounds_.size() : 1;
  std::int64_t const warps = own_rows_ * (rounds_.size() / ranks_per_warp);
  PackRoutesArgs<Config, Quant> const args{.round = rounds_.view(),
                                           .tokens = moe::detail::tokens_to_pack(quant_, wire_, in, own_rows_),
                                           .table = {.ids = in.topk_ids.data_handle(),
                                                     .stride = in.topk_ids.stride(0),
                                                     .topk = topk_,
                                                     .owner = owner_,
                                                     .local = local_,
                                                     .num_physical = num_physical_},
                                           .positions = positions_,
                                           .sent = sent_,
                                           .received = received_,
                                           .ranks_per_warp = ranks_per_warp};
  pack_routes<<<moe::detail::round_blocks(warps, moe::detail::kRoundWarps), moe::detail::kRoundThreads, 0, stream>>>(args);
  check_launch("pack_routes");
}

template <class Comm, class Config, class Quant, class Partial>
void AllToAllVExchange<Comm, Config, Quant, Partial, space::cuda>::launch_hide(cudaStream_t stream) {
  if (max_rows_ > 0) {
    hide_rows<<<moe::detail::round_blocks(max_rows_, moe::detail::kRoundThreads), moe::detail::kRoundThreads, 0, stream>>>(
        rounds_.view(), wire_, max_tokens_, received_);
    check_launch("hide_rows");
  }
}

template <class Comm, class Config, class Quant, class Partial>
void AllToAllVExchange<Comm, Config, Quant, Partial, space::cuda>::launch_sum(Rows<Act, Config::hidden> out, cudaStream_t stream) {
  auto const& v = rounds_.view();
  moe::detail::launch_sum_partial_rows(v, moe::detail::PartialRows<Partial>{partial_, returned_, positions_, v.in_first, v.out_first},
                                       own_rows_, hidden_, out.data_handle(), out.stride(0), stream);
}

}  // namespace moe::backends::detail
