// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/params.hpp: parameters of every kernel of the low-latency exchange, and how a batch of tokens is split
// into pieces.
#pragma once

#include "moe/backends/window/device/common/calls.hpp"
#include "moe/backends/window/device/low_latency/layout.hpp"
#include "moe/core/types.hpp"

namespace moe::detail {

inline constexpr int kLowLatencyThreads = 512;
inline constexpr int kPlanners = 64;  ///< threads that compute row positions and write the small words; the others move rows
inline constexpr int kMovers = kLowLatencyThreads - kPlanners;

/// Splits a batch of tokens into pieces of whole multiples of `step` values, so that few tokens still occupy all blocks.
struct LowLatencyPieces {
  int tokens = 0;
  int per_token = 1;
  int values = 0;  ///< of one piece; the last piece of a token may be shorter
  LowLatencyPieces() = default;
  MOE_HD int token(int item) const { return per_token == 1 ? item : item / per_token; }
  MOE_HD int first_value(int item) const { return per_token == 1 ? 0 : item % per_token * values; }
  MOE_HD LowLatencyPieces(int tokens, int hidden, int blocks, int step) : tokens(tokens) {
    int const steps = (hidden + step - 1) / step;
    int wanted = tokens > 0 ? blocks / tokens : 1;
    wanted = wanted < 1 ? 1 : wanted > steps ? steps : wanted;
    int const each = (steps + wanted - 1) / wanted;
    values = each * step;
    per_token = (steps + each - 1) / each;
  }
};
inline constexpr int kDispatchStep = 512;  ///< in values: the scales of a piece are whole 16-byte vectors
inline constexpr int kCombineStep = 256;

/// Parameters that are the same in every call. The constructor of LowLatencyCalls makes them from a shape that it has checked.
struct LowLatencyKernelParams {
  comm::WindowView window;
  LowLatencyLayout at;
  ExpertTable experts;
  std::uint32_t tag = 0;
  int max_tokens = 0, hidden = 0, topk = 0, num_experts = 0, local_experts = 0, capacity = 0, blocks = 0;
  bool masks = false;            ///< ranks may be dead: they are skipped, and rows have fixed positions
  bool weight_on_input = false;  ///< rows are multiplied by their weight before they travel, and sums use weight one; k = 1

  LowLatencyKernelParams() = default;
  /// E_CONFIG, E_UNSUPPORTED for the shape; E_ARG for the router weight on the input with top-k other than 1.
  LowLatencyKernelParams(comm::WindowView const& view, LowLatencyShape const& shape, ExchangeOptions const& options)
      : window(view),
        at(shape, options.begin),
        experts{options.expert_place, options.num_ids == 0 ? shape.num_experts : options.num_ids},
        tag(shape.tag()),
        max_tokens(shape.max_tokens),
        hidden(shape.hidden),
        topk(shape.topk),
        num_experts(shape.num_experts),
        local_experts(shape.local_experts()),
        capacity(shape.capacity()),
        blocks(shape.blocks),
        masks(shape.masks),
        weight_on_input(options.weight_on_input) {
    shape.check();
    if (options.weight_on_input && shape.topk != 1) {
      throw Error(ErrorCode::argument, "apply_router_weight_on_input requires topk == 1");
    }
  }
};

}  // namespace moe::detail
