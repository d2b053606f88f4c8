// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/params.hpp: parameters of every kernel of the high-throughput exchange.
#pragma once

#include "moe/backends/window/device/common/calls.hpp"
#include "moe/backends/window/device/high_throughput/layout.hpp"

namespace moe::detail {

/// Parameters that are the same in every call. The constructor of HighThroughputCalls makes them from a shape that it has checked.
struct HighThroughputKernelParams {
  comm::WindowView window;
  HighThroughputLayout at;
  ExpertTable experts;
  std::uint32_t tag = 0;
  int max_tokens = 0, hidden = 0, topk = 0, num_experts = 0, local_experts = 0, capacity = 0, alignment = 1;
  bool lists = true;

  HighThroughputKernelParams() = default;
  /// E_CONFIG, E_UNSUPPORTED for the shape.
  HighThroughputKernelParams(comm::WindowView const& view, HighThroughputShape const& shape, ExchangeOptions const& options)
      : window(view),
        at(shape),
        experts{options.expert_place, options.num_ids == 0 ? shape.num_experts : options.num_ids},
        max_tokens(shape.max_tokens),
        hidden(shape.hidden),
        topk(shape.topk),
        num_experts(shape.num_experts),
        local_experts(shape.local_experts()),
        capacity(shape.rows()),
        alignment(shape.alignment),
        lists(shape.lists) {
    set_shape(shape);
  }
  /// The same shape with another number of blocks.
  void set_shape(HighThroughputShape const& shape) {
    shape.check();
    tag = shape.tag();
  }
};

/// Which halves of the buffers a call uses.
struct HighThroughputParity {
  int rows = 0;     ///< half of the rows and outputs
  int routing = 0;  ///< half of the row positions; equal to `rows` unless cached
  /// `routing_parity` < 0: not cached.
  static HighThroughputParity of(int parity, int routing_parity) { return {parity, routing_parity >= 0 ? routing_parity : parity}; }
};

}  // namespace moe::detail
