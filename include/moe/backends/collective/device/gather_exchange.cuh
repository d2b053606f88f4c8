// SPDX-License-Identifier: Apache-2.0
// backends/collective/device/gather_exchange.cuh: the kernels of Naive and AllGatherReduceScatter on the device: records, local ids, the
// sum over ranks.
#pragma once

#include "moe/backends/collective/device/gather_exchange.hpp"
#include "moe/backends/collective/device/rounds.cuh"

namespace moe::detail {

/// Parameters of pack_rows.
template <class Config, class Quant>
struct PackRowsArgs {
  RoundView round;
  TokensToPack<Config, Quant> tokens;
  std::int32_t const* ids;  ///< device [M, k] physical ids, or kNoExpert
  std::int64_t ids_stride;  ///< elements between rows of ids
  std::byte* records;       ///< device: the records of all ranks' tokens, by rank
};

/// One warp per token: writes its record, with physical ids, at its position among those of all ranks.
template <class Config, class Quant>
__global__ void __launch_bounds__(kRoundThreads) pack_rows(PackRowsArgs<Config, Quant> const a) {
  RoundView const& v = a.round;
  auto const& wire = a.tokens.wire;
  if (*v.bad != 0) {
    return;
  }
  int const lane = static_cast<int>(threadIdx.x) % 32;
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * kRoundWarps;
  std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kRoundWarps + static_cast<int>(threadIdx.x) / 32;
  std::byte* const own = a.records + v.in_first[v.rank] * wire.bytes();
  for (; t < a.tokens.rows; t += step) {
    std::byte* const record = own + t * wire.bytes();
    pack_record(a.tokens, t, record, lane);
    for (std::int64_t j = lane; j < wire.topk(); j += 32) {
      wire.ids(record)[j] = a.ids[t * a.ids_stride + j];
    }
  }
}

/// Parameters of map_ids.
template <class Wire>
struct MapIdsArgs {
  RoundView round;
  Wire wire;                       ///< the layout of a record
  std::int32_t const* expert_map;  ///< device [num_physical] local ids, or kNoExpert
  int num_physical;
  std::int64_t rows;        ///< records of all ranks
  std::int64_t max_tokens;  ///< fixed sizes: records of each rank; exact sizes: 0
  std::byte* records;       ///< device [rows]
};

/// Physical to local ids; rows past a rank's count (fixed sizes) and all rows of a failed round get no expert.
template <class Wire>
__global__ void map_ids(MapIdsArgs<Wire> const a) {
  RoundView const& v = a.round;
  Wire const& wire = a.wire;
  bool const bad = *v.bad != 0;
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < a.rows * wire.topk(); i += step) {
    std::int64_t const row = i / wire.topk();
    bool const here = !bad && (a.max_tokens == 0 || row % a.max_tokens < v.headers[row / a.max_tokens * v.words + kRows]);
    std::int32_t* const id = wire.ids(a.records + row * wire.bytes()) + i % wire.topk();
    *id = here && *id >= 0 && *id < a.num_physical ? a.expert_map[*id] : kNoExpert;
  }
}

template <class Partial>
__global__ void widen_partial(Partial const* in, std::int64_t n, float* out) {
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
    out[i] = to_float(in[i]);
  }
}

template <class Backend, class Config, class Quant, class Partial>
void GatherExchange<Backend, Config, Quant, Partial, space::cuda>::launch_pack(RoutedTokens<Act, Config::hidden> const& in,
                                                                               cudaStream_t stream) {
  if (own_rows_ > 0) {
    PackRowsArgs<Config, Quant> const args{.round = rounds_.view(),
                                           .tokens = tokens_to_pack(quant_, wire_, in, own_rows_),
                                           .ids = in.topk_ids.data_handle(),
                                           .ids_stride = in.topk_ids.stride(0),
                                           .records = records_};
    pack_rows<<<round_blocks(own_rows_, kRoundWarps), kRoundThreads, 0, stream>>>(args);
    check_launch("pack_rows");
  }
}

template <class Backend, class Config, class Quant, class Partial>
void GatherExchange<Backend, Config, Quant, Partial, space::cuda>::launch_map(cudaStream_t stream) {
  if (total_ > 0) {
    MapIdsArgs<WireRow<Config, Quant>> const args{.round = rounds_.view(),
                                                  .wire = wire_,
                                                  .expert_map = expert_map_,
                                                  .num_physical = num_physical_,
                                                  .rows = total_,
                                                  .max_tokens = fixed_ ? max_tokens_ : 0,
                                                  .records = records_};
    map_ids<<<round_blocks(total_ * topk_, kRoundThreads), kRoundThreads, 0, stream>>>(args);
    check_launch("map_ids");
  }
}

template <class Backend, class Config, class Quant, class Partial>
void GatherExchange<Backend, Config, Quant, Partial, space::cuda>::launch_widen(cudaStream_t stream) {
  widen_partial<<<round_blocks(total_ * hidden_, kRoundThreads), kRoundThreads, 0, stream>>>(partial_, total_ * hidden_, widened_);
  check_launch("widen_partial");
}

template <class Backend, class Config, class Quant, class Partial>
void GatherExchange<Backend, Config, Quant, Partial, space::cuda>::launch_sum(Rows<Act, Config::hidden> out, cudaStream_t stream) {
  RoundView v = rounds_.view();
  if constexpr (Backend::kReducesEverywhere) {
    float const* const sums = kWidens ? widened_ : reinterpret_cast<float const*>(partial_);
    std::int64_t const* const first = v.in_first + v.rank;
    v.rank = 0;
    v.size = 1;  // one term: the sum is done
    launch_sum_partial_rows(v, PartialRows<float>{sums, nullptr, nullptr, first, nullptr}, own_rows_, hidden_, out.data_handle(),
                            out.stride(0), stream);
  } else {
    launch_sum_partial_rows(v, PartialRows<Partial>{partial_, returned_, nullptr, v.in_first, fixed_ ? v.in_first : nullptr}, own_rows_,
                            hidden_, out.data_handle(), out.stride(0), stream);
  }
}

}  // namespace moe::detail
