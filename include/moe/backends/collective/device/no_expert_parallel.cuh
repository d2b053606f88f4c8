// SPDX-License-Identifier: Apache-2.0
// backends/collective/device/no_expert_parallel.cuh: the kernels of NoExpertParallel: ids checked, rows quantised, partial sums rounded.
#pragma once

#include <algorithm>

#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/quantization/rows/quantize_rows.cuh"

namespace moe::backends::detail {

inline constexpr int kThreads = 256;
inline unsigned blocks_for(std::int64_t n) {
  return static_cast<unsigned>(std::clamp<std::int64_t>((n + kThreads - 1) / kThreads, 1, 65535));
}

/// A grid-stride loop over n items.
template <class F>
__device__ void for_each_item(std::int64_t n, F const& f) {
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += step) {
    f(i);
  }
}

/// Parameters of localize_ids.
template <class Id>
struct LocalizeIdsArgs {
  Id const* ids;        ///< device [rows, topk] physical ids, or kNoExpert
  std::int64_t stride;  ///< elements between rows of ids
  std::int64_t rows;
  std::int64_t topk;
  int num_physical;
  Id const* expert_map;  ///< device [num_physical] local ids, or null: the ids are local
  Id* out;               ///< device [rows, topk] local ids, or kNoExpert; dense
};

template <class Id>
__global__ void localize_ids(LocalizeIdsArgs<Id> const a) {
  for_each_item(a.rows * a.topk, [&](std::int64_t i) {
    std::int32_t const id = a.ids[i / a.topk * a.stride + i % a.topk];
    bool const exists = id >= 0 && id < a.num_physical;
    a.out[i] = !exists ? kNoExpert : a.expert_map == nullptr ? id : a.expert_map[id];
  });
}

template <class Partial, class Act>
__global__ void convert_rows(Partial const* y, std::int64_t rows, std::int64_t hidden, Act* out, std::int64_t stride) {
  for_each_item(rows * hidden, [&](std::int64_t i) { out[i / hidden * stride + i % hidden] = from_float<Act>(to_float(y[i])); });
}

template <class Config, class Quant, class Partial>
void LocalExchange<space::cuda, Config, Quant, Partial>::launch_localize(Rows<std::int32_t const> ids, cudaStream_t stream) {
  if (rows_ == 0) {
    return;
  }
  LocalizeIdsArgs<std::int32_t> const args{.ids = ids.data_handle(),
                                           .stride = ids.stride(0),
                                           .rows = rows_,
                                           .topk = topk_,
                                           .num_physical = num_physical_,
                                           .expert_map = expert_map_,
                                           .out = ids_};
  localize_ids<<<blocks_for(rows_ * topk_), kThreads, 0, stream>>>(args);
  check_launch("localize_ids");
}

template <class Config, class Quant, class Partial>
void LocalExchange<space::cuda, Config, Quant, Partial>::launch_quantize(Rows<Act const, Config::hidden> hidden, cudaStream_t stream) {
  if (rows_ == 0) {
    return;
  }
  quantization::quantize_rows_on_device<Quant, Act>(quant_, make_strided_rows(hidden.data_handle(), rows_, hidden_, hidden.stride(0)),
                                                    make_rows(payload_, rows_, Quant::payload_cols(hidden_)),
                                                    make_rows(scales_, rows_, Quant::scale_cols(hidden_)), stream);
}

template <class Config, class Quant, class Partial>
void LocalExchange<space::cuda, Config, Quant, Partial>::launch_convert(Rows<Act, Config::hidden> out, cudaStream_t stream) {
  if (rows_ == 0) {
    return;
  }
  convert_rows<<<blocks_for(rows_ * hidden_), kThreads, 0, stream>>>(partial_, rows_, hidden_, out.data_handle(), out.stride(0));
  check_launch("convert_rows");
}

}  // namespace moe::backends::detail
