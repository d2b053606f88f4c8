// SPDX-License-Identifier: Apache-2.0
// backends/collective/device/gather_exchange.cuh: the kernels of Naive and AllGatherReduceScatter on the device: records, local ids, the
// sum over ranks.
#pragma once

#include "moe/backends/collective/device/gather_exchange.hpp"
#include "moe/backends/collective/device/rounds.cuh"

namespace moe::detail {

/// One warp per token: writes its record, with physical ids, at its position among those of all ranks.
template <class Config, class Quant>
__global__ void __launch_bounds__(kRoundThreads)
    pack_rows(RoundView const v, Quant const quant, WireRow<Config, Quant> const wire, typename Config::Act const* x, std::int64_t x_stride,
              std::int32_t const* ids, std::int64_t ids_stride, float const* weights, std::int64_t weights_stride, std::int64_t rows,
              std::byte* records) {
  if (*v.bad != 0) {
    return;
  }
  int const lane = static_cast<int>(threadIdx.x) % 32;
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * kRoundWarps;
  std::int64_t t = static_cast<std::int64_t>(blockIdx.x) * kRoundWarps + static_cast<int>(threadIdx.x) / 32;
  for (; t < rows; t += step) {
    std::byte* const record = records + (v.in_first[v.rank] + t) * wire.bytes();
    pack_record(quant, wire, x + t * x_stride, weights + t * weights_stride, record, lane);
    for (std::int64_t j = lane; j < wire.topk(); j += 32) {
      wire.ids(record)[j] = ids[t * ids_stride + j];
    }
  }
}

/// Physical to local ids; rows past a rank's count (max_tokens > 0: fixed sizes) and all rows of a failed round get no expert.
template <class Wire>
__global__ void map_ids(RoundView const v, Wire const wire, std::int32_t const* expert_map, int num_physical, std::int64_t rows,
                        std::int64_t max_tokens, std::byte* records) {
  bool const bad = *v.bad != 0;
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < rows * wire.topk(); i += step) {
    std::int64_t const row = i / wire.topk();
    bool const here = !bad && (max_tokens == 0 || row % max_tokens < v.headers[row / max_tokens * v.words + kRows]);
    std::int32_t* const id = wire.ids(records + row * wire.bytes()) + i % wire.topk();
    *id = here && *id >= 0 && *id < num_physical ? expert_map[*id] : kNoExpert;
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
    pack_rows<Config, Quant><<<round_blocks(own_rows_, kRoundWarps), kRoundThreads, 0, stream>>>(
        rounds_.view(), quant_, wire_, in.hidden.data_handle(), in.hidden.stride(0), in.topk_ids.data_handle(), in.topk_ids.stride(0),
        in.topk_weights.data_handle(), in.topk_weights.stride(0), own_rows_, records_);
    check_launch("pack_rows");
  }
}

template <class Backend, class Config, class Quant, class Partial>
void GatherExchange<Backend, Config, Quant, Partial, space::cuda>::launch_map(cudaStream_t stream) {
  if (total_ > 0) {
    map_ids<<<round_blocks(total_ * topk_, kRoundThreads), kRoundThreads, 0, stream>>>(rounds_.view(), wire_, expert_map_, num_physical_,
                                                                                       total_, fixed_ ? max_tokens_ : 0, records_);
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
