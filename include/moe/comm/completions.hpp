// SPDX-License-Identifier: Apache-2.0
// comm/completions.hpp: what experts tell an exchange whose combine starts while their products still run. docs/semantics/exchange.md §7.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/comm/symmetric_memory.hpp"

namespace moe::comm {

inline constexpr int kMaxColumnBlocks = 8;

/// Words in the windows of all ranks that say which columns of this rank's output rows are complete. The output is cut into blocks of
/// columns; experts finish all rows of one block, tell every rank, and go on with the next. A block is told in every round, also by a rank
/// without rows.
struct Completions {
  WindowView window;
  std::size_t ready = 0;                 ///< byte offset in each window: u32 [blocks][R], the round of rank r's block that is complete
  std::uint32_t const* round = nullptr;  ///< device [1]: this round's number, complete before a kernel of the experts starts
  int blocks = 0;                        ///< 1 to kMaxColumnBlocks
  int columns = 0;                       ///< of a block, a multiple of 256; the last may have fewer
  int combine_blocks = 0;                ///< thread blocks of the combine, which needs a multiprocessor for each
};

}  // namespace moe::comm
