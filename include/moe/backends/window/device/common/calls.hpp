// SPDX-License-Identifier: Apache-2.0
// backends/window/device/common/calls.hpp: the parameters of the calls of all device exchanges: tokens, and options of a rank.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "moe/comm/symmetric_memory.hpp"

namespace moe::detail {

/// The input of one call of the exchange. Device pointers; row strides are multiples of 16 bytes.
struct ExchangeTokens {
  int tokens = 0;                               ///< M, or an upper bound
  std::int32_t const* tokens_device = nullptr;  ///< optional: M on the device, at most `tokens`
  __nv_bfloat16 const* x = nullptr;
  std::int64_t x_stride = 0;
  std::int32_t const* ids = nullptr;
  float const* weights = nullptr;
};

/// Where the expert of each id is.
struct ExpertTable {
  std::int32_t const* place = nullptr;  ///< device [num_ids]: rank * L + local of every id; null: the id itself
  int num_ids = 0;                      ///< ids that have an expert
};

/// How to compute the scale of 128 values from their largest magnitude.
struct ScaleRule {
  float amax_floor = 1e-4F;  ///< lower bound of amax: 1e-4 in the transport's own cast, 1e-10 in group quantisation
  bool pow2 = false;         ///< scales are rounded up to powers of two
};

/// Options that a rank may choose independently.
struct ExchangeOptions {
  bool programmatic = true;  ///< programmatic dependent launch; not for ranks that share a GPU
  ScaleRule scales{};
  bool fenced = true;                             ///< combine publishes its ready flag with a fence (comm::detail::announce says why)
  std::int32_t const* expert_place = nullptr;     ///< device [num_ids]: rank * L + local of every id; null: the id itself
  int num_ids = 0;                                ///< ids that have an expert; 0: the shape's num_experts
  bool weight_on_input = false;                   ///< rows are multiplied by their weight before they are quantised; k = 1
  std::int64_t* expert_totals = nullptr;          ///< device [L]: rows received in all calls
  std::size_t begin = comm::kWindowControlBytes;  ///< first byte of the exchange in the window
};

}  // namespace moe::detail
