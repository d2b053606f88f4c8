// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/layout.hpp: layout of the window of the high-throughput exchange. Equal on all ranks.
// docs/semantics/exchange.md §7.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "moe/backends/window/device/common/layout.hpp"
#include "moe/comm/completions.hpp"
#include "moe/core/error.hpp"
#include "moe/core/types.hpp"

namespace moe::detail {

/// What all ranks of a high-throughput exchange agree on.
struct HighThroughputShape {
  int ranks = 1;
  int max_tokens = 0;  ///< tokens that one rank may bring
  int hidden = 0;      ///< a multiple of 16
  int topk = 0;
  int num_experts = 0;  ///< places of experts, ranks * local_experts(): rank e / L owns place e
  bool fp8 = true;
  bool lists = true;  ///< also build expert-major lists of rows
  int alignment = 1;  ///< every expert's part of the list starts and ends at a multiple of it
  int capacity = 0;   ///< rows that one rank can receive; 0: the worst case, ranks * max_tokens
  int blocks = 16;
  int parities = 2;       ///< 1: dispatch and combine strictly alternate
  bool arriving = false;  ///< experts may start before the rows have come
  int column_blocks = 0;  ///< above 0: a combine may follow the experts in as many blocks of columns, or fewer, as hidden allows
  int layer = 0;          ///< number of the exchange among those that share a window

  int local_experts() const { return num_experts / ranks; }
  int groups() const { return (hidden + 127) / 128; }
  int rows() const { return capacity > 0 ? capacity : ranks * max_tokens; }
  /// Columns of a block but the last, a multiple of 256.
  int columns() const { return column_blocks == 0 ? 0 : (hidden + 256 * column_blocks - 1) / (256 * column_blocks) * 256; }
  int num_column_blocks() const { return column_blocks == 0 ? 0 : (hidden + columns() - 1) / columns(); }
  /// Entries of the expert-major list in the worst case.
  std::int64_t list_size() const {
    return static_cast<std::int64_t>(rows()) * topk + static_cast<std::int64_t>(local_experts()) * (alignment - 1);
  }
  std::uint32_t tag() const {
    return comm::HeaderTag{}
        .add(2)
        .add(ranks)
        .add(max_tokens)
        .add(hidden)
        .add(topk)
        .add(num_experts)
        .add(fp8)
        .add(lists)
        .add(alignment)
        .add(rows())
        .add(blocks)
        .add(parities + (arriving ? 2 : 0) + 4 * num_column_blocks())
        .add(static_cast<std::uint64_t>(layer))
        .value();
  }
  /// Checks the shape. E_CONFIG or E_UNSUPPORTED, naming the value.
  void check() const {
    constexpr char const* kName = "high_throughput";
    check_sizes(*this, {kName, 32, 16, 1024});
    require_shape(kName, alignment >= 1, ErrorCode::config, "expert alignment ", alignment, " must be at least 1");
    require_shape(kName, parities == 1 || parities == 2, ErrorCode::config, parities, " parities, 1 or 2");
    require_shape(kName, column_blocks >= 0 && column_blocks <= comm::kMaxColumnBlocks, ErrorCode::config, column_blocks,
                  " column blocks, at most ", comm::kMaxColumnBlocks);
  }
};

/// Planners: warps of a block that compute row positions while the others prepare their first rows. One thread for each of `n` counts, and
/// at most three quarters of the warps.
MOE_HD inline int high_throughput_planners(int n, int warps) {
  int const wanted = (n + 31) / 32;
  int const most = warps < 2 ? 1 : 3 * warps / 4;
  return wanted < most ? wanted : most;
}

/// First token of the range of `block`.
MOE_HD inline int first_token(int tokens, int block, int blocks) {
  return static_cast<int>(static_cast<std::int64_t>(tokens) * block / blocks);
}

inline constexpr std::uint32_t kMoved = 1U << 20;  ///< all blocks of a dispatch have moved their rows

/// Byte offsets in the window.
struct HighThroughputLayout {
  std::size_t sent = 0;           ///< own: u32 [blocks]
  std::size_t combined = 0;       ///< own: u32 [blocks]
  std::size_t counted = 0;        ///< own: u32 [blocks] round in which this block wrote its histogram
  std::size_t tickets = 0;        ///< own: u64 [blocks] round and next token of this block's range
  std::size_t histogram = 0;      ///< own: i32 [blocks][E + R]
  std::size_t arrive = 0;         ///< u32 [rank][blocks]
  std::size_t ready = 0;          ///< u32 [rank]
  std::size_t counts[2] = {};     ///< u64 [rank][E + R]: rows from that rank for every expert, then for every rank
  std::size_t rows[2] = {};       ///< [rows][row_bytes]
  std::size_t scales[2] = {};     ///< float [rows][scale_stride]
  std::size_t records[2] = {};    ///< [rows][record_words]: i32 [k] local ids or -1; float [k] weights, 0 where the id is -1; with lists
                                  ///< i32 [k] position in the expert-major list or -1; i32 source rank * max_tokens + token
  std::size_t list[2] = {};       ///< i32 [list_size] rows by expert; -1 in the gaps
  std::size_t outputs[2] = {};    ///< bf16 [rows][H]: weighted and summed over this rank's experts, for combine
  std::size_t sent_rows[2] = {};  ///< own: i32 [T][R] row of a token at each rank, or -1
  std::size_t sent_positions[2] = {};  ///< own: i32 [T][k] position of each choice in its expert's list
  std::size_t summary[2] = {};         ///< own: i32 {rows, list entries, [L] rows per expert, [L] first list entry per expert}
  std::size_t moved[2] = {};           ///< own, arriving: u32 blocks that have moved their rows; kMoved more when all have
  std::size_t order = 0;               ///< own, arriving: i32 [T] tokens in the order in which each block sends them
  std::size_t arrived[2] = {};         ///< arriving: u32 [rank][L] complete rows from that rank for each local expert
  std::size_t finished[2] = {};        ///< own, with column blocks: u32 [blocks] combines that this parity has had
  std::size_t round[2] = {};           ///< own, with column blocks: u32 number of the last dispatch among those of this parity
  std::size_t complete[2] = {};        ///< with column blocks: u32 [column block][rank] the round in which that rank's rows are complete
  std::size_t bytes = 0;
  int row_bytes = 0;
  int scale_stride = 0;  ///< floats from row to row: whole 128-byte lines, which transfer faster than partial ones
  int record_words = 0;  ///< words from row to row, a multiple of 8

  HighThroughputLayout() = default;
  explicit HighThroughputLayout(HighThroughputShape const& s) {
    DeviceWindowOffsets offsets;
    auto take = [&](std::size_t bytes) { return offsets.take(1, static_cast<std::int64_t>(bytes)); };
    auto const R = static_cast<std::size_t>(s.ranks);
    auto const T = static_cast<std::size_t>(s.max_tokens);
    auto const K = static_cast<std::size_t>(s.topk);
    auto const E = static_cast<std::size_t>(s.num_experts);
    auto const n = static_cast<std::size_t>(s.rows());
    row_bytes = s.fp8 ? s.hidden : 2 * s.hidden;
    scale_stride = (s.groups() + 31) / 32 * 32;
    record_words = ((s.lists ? 3 : 2) * s.topk + 1 + 7) / 8 * 8;
    sent = take(4 * kMaxExchangeBlocks);
    combined = take(4 * kMaxExchangeBlocks);
    counted = take(4 * kMaxExchangeBlocks);
    tickets = take(8 * kMaxExchangeBlocks);
    histogram = take(4 * kMaxExchangeBlocks * (E + R));
    arrive = take(4 * R * kMaxExchangeBlocks);
    ready = take(4 * comm::kMaxWindowRanks);
    if (s.arriving) {
      order = take(4 * T);
    }
    for (int p = 0; s.column_blocks > 0 && p < s.parities; ++p) {
      finished[p] = take(4 * kMaxExchangeBlocks);
      round[p] = take(4);
      complete[p] = take(4 * R * static_cast<std::size_t>(s.num_column_blocks()));
    }
    for (int p = 0; p < s.parities; ++p) {
      counts[p] = take(8 * R * (E + R));
      sent_rows[p] = take(4 * T * R);
      sent_positions[p] = take(4 * T * K);
      summary[p] = take(4 * (2 + 2 * static_cast<std::size_t>(s.local_experts())));
      records[p] = take(4 * n * static_cast<std::size_t>(record_words));
      if (s.arriving) {
        moved[p] = take(4);
        arrived[p] = take(4 * R * static_cast<std::size_t>(s.local_experts()));
      }
      if (s.lists) {
        list[p] = take(4 * static_cast<std::size_t>(s.list_size()));
      }
      rows[p] = take(n * static_cast<std::size_t>(row_bytes));
      if (s.fp8) {
        scales[p] = take(n * static_cast<std::size_t>(scale_stride) * 4);
      }
      outputs[p] = take(n * static_cast<std::size_t>(s.hidden) * 2);
    }
    bytes = offsets.bytes();
  }
};

}  // namespace moe::detail
