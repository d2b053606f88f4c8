// SPDX-License-Identifier: Apache-2.0
// comm/arrivals.hpp: what an exchange tells experts that start while rows are still on their way. docs/semantics/exchange.md §7.
#pragma once

#include <cstdint>

#include "moe/comm/symmetric_memory.hpp"

namespace moe::comm {

/// Counts of the rows that have come, in device memory, for kernels that run beside the dispatch that brings the rows. The ids, weights
/// and row count of the dispatch are complete before such a kernel starts; a row is complete when the counts of its expert are. An exchange
/// that sends rows in pieces counts those.
struct Arrivals {
  WindowView window;                        ///< its deadline, and where a failure is recorded
  std::uint32_t const* arrived = nullptr;   ///< [R][L] rows of each rank for each local expert that are complete
  std::uint64_t const* expected = nullptr;  ///< [R][stride] count words: rows that each rank sends to each local expert
  int stride = 0;
  int experts = 0;  ///< L
};

}  // namespace moe::comm
