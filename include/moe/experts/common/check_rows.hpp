// SPDX-License-Identifier: Apache-2.0
// experts/common/check_rows.hpp: whether a call's rows fit the memory that experts took at construction.
#pragma once

#include <cstdint>

#include "moe/core/error.hpp"

namespace moe::experts::detail {

/// E_ARG for more rows (of a batch: rows per expert) than `max_rows`, or for an output with room for fewer.
inline void check_rows(std::int64_t rows, std::int64_t out_rows, std::int64_t max_rows) {
  if (rows > max_rows || out_rows < rows) {
    throw Error(ErrorCode::argument, text("experts: ", rows, " rows, capacity ", max_rows, ", room for ", out_rows, " rows of output"));
  }
}

}  // namespace moe::experts::detail
