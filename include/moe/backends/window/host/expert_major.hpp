// SPDX-License-Identifier: Apache-2.0
// backends/window/host/expert_major.hpp: rows of a standard dispatch sorted by expert, in the host space, for experts that process one
// expert's batch at a time. docs/semantics/exchange.md §12. The device's high-throughput exchange makes the same lists in its kernel.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "moe/backends/window/host/batch.hpp"
#include "moe/core/tokens.hpp"

namespace moe::backends {

/// The row of each entry. Entries of one expert are contiguous, sorted by row, and begin at a multiple of the alignment.
struct ExpertMajorList {
  std::vector<std::int32_t> rows;    ///< -1 in the gaps that the alignment leaves
  std::vector<std::int32_t> counts;  ///< [L] entries of each expert
  std::vector<std::int32_t> first;   ///< [L] its first entry
};

/// All columns count: a row that names an expert twice has two entries. E_CONFIG for an alignment below 1. Allocates.
template <class Payload, class Scale>
ExpertMajorList expert_major(StandardTokens<Payload, Scale> const& tokens, int num_local, int alignment) {
  if (alignment < 1) {
    throw Error(ErrorCode::config, text("expert alignment: ", alignment, " must be at least 1"));
  }
  ExpertMajorList list;
  auto const n = static_cast<std::size_t>(num_local);
  list.counts.assign(n, 0);
  list.first.assign(n, 0);
  auto each = [&](auto&& visit) {
    for (std::int64_t r = 0; r < tokens.rows.extent(0); ++r) {
      for (std::int64_t j = 0; j < tokens.topk_ids.extent(1); ++j) {
        if (tokens.topk_ids(r, j) != kNoExpert) {
          visit(r, static_cast<std::size_t>(tokens.topk_ids(r, j)));
        }
      }
    }
  };
  each([&](std::int64_t, std::size_t e) { ++list.counts[e]; });
  std::int32_t end = 0;
  for (std::size_t e = 0; e < n; ++e) {
    list.first[e] = end;
    end += (list.counts[e] + alignment - 1) / alignment * alignment;
  }
  list.rows.assign(static_cast<std::size_t>(end), -1);
  std::vector<std::int32_t> next = list.first;
  each([&](std::int64_t r, std::size_t e) { list.rows[static_cast<std::size_t>(next[e]++)] = static_cast<std::int32_t>(r); });
  return list;
}

/// out[r] = Σ_j w_j y[entry of (r, j)], float32 in j order, one rounding. A caller that uses the layout must call it before combine.
template <class Payload, class Scale, class Y, class Out>
void reduce_expert_major(StandardTokens<Payload, Scale> const& tokens, ExpertMajorList const& list, Rows<Y> y, Rows<Out> out) {
  std::vector<std::int32_t> next = list.first;
  std::array<std::int32_t, kMaxTopK> entry{};
  for (std::int64_t r = 0; r < tokens.rows.extent(0); ++r) {
    std::int64_t const k = tokens.topk_ids.extent(1);
    for (std::int64_t j = 0; j < k; ++j) {
      std::int32_t const e = tokens.topk_ids(r, j);
      entry[static_cast<std::size_t>(j)] = e == kNoExpert ? -1 : next[static_cast<std::size_t>(e)]++;
    }
    moe::detail::sum_rows(
        k,
        [&](std::int64_t j) {
          std::int32_t const i = entry[static_cast<std::size_t>(j)];
          return i < 0 ? nullptr : row_ptr(y, i);
        },
        [&](std::int64_t j) { return tokens.topk_weights(r, j); }, out.extent(1), row_ptr(out, r));
  }
}

}  // namespace moe::backends
