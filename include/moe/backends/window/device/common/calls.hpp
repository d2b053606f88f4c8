// SPDX-License-Identifier: Apache-2.0
// backends/window/device/common/calls.hpp: what the calls of all device exchanges are given: tokens, and what a rank chooses for itself.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "moe/comm/symmetric_memory.hpp"

namespace moe::detail {

/// What one call of the exchange works on. Device pointers; rows of 16-byte multiples.
struct ExchangeTokens {
  int tokens = 0;                               ///< M, or its bound
  std::int32_t const* tokens_device = nullptr;  ///< optional: M on the device, at most `tokens`
  __nv_bfloat16 const* x = nullptr;
  std::int64_t x_stride = 0;
  std::int32_t const* ids = nullptr;
  float const* weights = nullptr;
};

/// Where the experts of ids are.
struct ExpertTable {
  std::int32_t const* place = nullptr;  ///< device [num_ids]: rank * L + local of every id; null: that is the id
  int num_ids = 0;                      ///< ids that have an expert
};

/// How the scale of 128 values follows from the largest of them.
struct ScaleRule {
  float amax_floor = 1e-4F;  ///< amax is at least this: 1e-4 in the transport's own cast, 1e-10 in group quantisation
  bool pow2 = false;         ///< scales are rounded up to powers of two
};

/// What a rank may choose for itself.
struct ExchangeOptions {
  bool programmatic = true;  ///< each kernel's blocks are placed while the kernel before it ends; not for ranks that share a GPU
  ScaleRule scales{};
  bool fenced = true;                             ///< combine publishes its ready flag with a fence (comm::detail::announce says why)
  std::int32_t const* expert_place = nullptr;     ///< device [num_ids]: rank * L + local of every id; null: that is the id
  int num_ids = 0;                                ///< ids that have an expert; 0: the shape's num_experts
  bool weight_on_input = false;                   ///< rows are multiplied with their weight before they are quantised; k = 1
  std::int64_t* expert_totals = nullptr;          ///< device [L]: rows received in all calls
  std::size_t begin = comm::kWindowControlBytes;  ///< first byte of the window that is the exchange's
};

}  // namespace moe::detail
