// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/layout.hpp: layout of the window of the low-latency exchange. Equal on all ranks.
// docs/semantics/exchange.md §8.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "moe/backends/common/combine_format.hpp"
#include "moe/backends/window/device/common/layout.hpp"
#include "moe/comm/symmetric_memory.hpp"
#include "moe/core/error.hpp"
#include "moe/core/types.hpp"

namespace moe::detail {

/// Ranks whose arriving rows a warp of the experts waits for, one a lane.
inline constexpr int kMostArrivingRanks = 32;

/// What all ranks of a low-latency exchange agree on.
struct LowLatencyShape {
  int ranks = 1;
  int max_tokens = 0;     ///< T: tokens that one rank may bring
  int hidden = 0;         ///< H, a multiple of 16
  int topk = 0;           ///< k
  int num_experts = 0;    ///< places of experts, ranks * local_experts(): rank e / L owns place e
  bool fp8 = true;        ///< rows travel as e4m3 with one float scale per 128; else bf16
  bool per_rank = false;  ///< one row per (token, rank), gathered by index; else one row per (token, expert), in the expert's batch
  int blocks = 128;       ///< thread blocks of every exchange kernel, all resident at once
  /// Ranks may die: rows of a source have fixed positions (T for each source in every expert's batch), and experts gather them by index.
  bool masks = false;
  CombineFormat combine = CombineFormat::plain;  ///< the format in which expert outputs travel
  bool arriving = false;                         ///< rows are counted where they come, so that experts may start before
  int layer = 0;                                 ///< number of the exchange among those that share a window

  int local_experts() const { return num_experts / ranks; }
  int capacity() const { return max_tokens * ranks; }  ///< rows of one expert's batch
  int groups() const { return (hidden + 127) / 128; }

  std::uint32_t tag() const {
    return comm::HeaderTag{}
        .add(1)
        .add(ranks)
        .add(max_tokens)
        .add(hidden)
        .add(topk)
        .add(num_experts)
        .add(fp8)
        .add(per_rank)
        .add(blocks)
        .add((masks ? 1 : 0) + (arriving ? 2 : 0))
        .add(static_cast<std::uint64_t>(combine))
        .add(static_cast<std::uint64_t>(layer))
        .value();
  }
  /// Checks the shape. E_CONFIG or E_UNSUPPORTED, naming the value.
  void check() const {
    check_sizes(*this, {"low_latency", comm::kMaxWindowRanks, 16, 2048});
    require_shape("low_latency", !(masks && per_rank), ErrorCode::config, "masks for dead ranks need a row for each (token, expert)");
    require_shape("low_latency", !arriving || (!masks && !per_rank && ranks <= kMostArrivingRanks), ErrorCode::config,
                  "rows are counted where they come without masks, in a row for each (token, expert), from at most ", kMostArrivingRanks,
                  " ranks");
  }
};

/// Byte offsets in the window. Regions that a later operation may overwrite while an earlier one is still read exist twice.
struct LowLatencyLayout {
  std::size_t sent = 0;                ///< own: u32 [blocks] rounds of dispatch sends
  std::size_t received = 0;            ///< own: u32 [blocks] rounds of dispatch receives
  std::size_t combined = 0;            ///< own: u32 [blocks] rounds of combines
  std::size_t arrive = 0;              ///< u32 [rank][blocks]: that rank's block has stored its rows of the round
  std::size_t ready = 0;               ///< u32 [rank]: that rank's expert outputs of the round may be read
  std::size_t counts[2] = {};          ///< u64 [rank][count_stride]: rows from that rank for every expert, then its number of tokens
  std::size_t rows[2] = {};            ///< expert batches [L][C] or per-rank rows [R][T], row_bytes each
  std::size_t scales[2] = {};          ///< float, groups() per row
  std::size_t sources[2] = {};         ///< i32 [L][C]: source rank * T + token; in the per-rank layout the row to gather
  std::size_t gather[2] = {};          ///< masks only: own i32 [L][C] rows to gather, counted over all batches
  std::size_t bases[2] = {};           ///< masks only: i32 [L][R] rows of lower sources in every batch, as this rank counted them
  std::size_t choices[2] = {};         ///< per rank only: [R*T] choice records: i32 [k] position in [L*C] or -1, then float [k] weights
  std::size_t present[2] = {};         ///< per rank only: u32 [R*T] round in which the choice record was written
  std::size_t round_of[2] = {};        ///< own: u32 last dispatch round of each parity
  std::size_t outputs[2] = {};         ///< expert outputs [L][C], or locally reduced rows [R*T]: bf16 [H], or coded in output_bytes
  std::size_t headers[2] = {};         ///< coded outputs only: u32 [groups()] per row
  std::size_t sent_positions[2] = {};  ///< own: i32 [T][k] position of each choice in its expert's batch, or -1
  std::size_t bytes = 0;
  int row_bytes = 0;
  int output_bytes = 0;
  int count_stride = 0;

  LowLatencyLayout() = default;
  /// `begin`: the first free byte, a multiple of 256.
  explicit LowLatencyLayout(LowLatencyShape const& s, std::size_t begin = comm::kWindowControlBytes) {
    DeviceWindowOffsets offsets(begin);
    auto take = [&](std::size_t bytes) { return offsets.take(1, static_cast<std::int64_t>(bytes)); };
    auto const R = static_cast<std::size_t>(s.ranks);
    auto const T = static_cast<std::size_t>(s.max_tokens);
    auto const K = static_cast<std::size_t>(s.topk);
    auto const batch = static_cast<std::size_t>(s.local_experts()) * static_cast<std::size_t>(s.capacity());
    std::size_t const n = s.per_rank ? R * T : batch;
    row_bytes = s.fp8 ? s.hidden : 2 * s.hidden;
    output_bytes = static_cast<int>(combine_row_bytes(s.combine, s.hidden));
    count_stride = s.num_experts + 2;
    sent = take(4 * kMaxExchangeBlocks);
    received = take(4 * kMaxExchangeBlocks);
    combined = take(4 * kMaxExchangeBlocks);
    arrive = take(4 * R * kMaxExchangeBlocks);
    ready = take(4 * comm::kMaxWindowRanks);
    for (int p = 0; p < 2; ++p) {
      counts[p] = take(8 * R * static_cast<std::size_t>(count_stride));
      sent_positions[p] = take(4 * T * K);
      sources[p] = take(4 * batch);
      round_of[p] = take(4);
      if (s.per_rank) {
        choices[p] = take(8 * R * T * K);
        present[p] = take(4 * R * T);
      }
      if (s.masks) {
        gather[p] = take(4 * batch);
        bases[p] = take(4 * static_cast<std::size_t>(s.local_experts()) * R);
      }
      rows[p] = take(n * static_cast<std::size_t>(row_bytes));
      if (s.fp8) {
        scales[p] = take(n * static_cast<std::size_t>(s.groups()) * 4);
      }
      outputs[p] = take(n * static_cast<std::size_t>(output_bytes));
      if (s.combine != CombineFormat::plain) {
        headers[p] = take(4 * n * static_cast<std::size_t>(s.groups()));
      }
    }
    bytes = offsets.bytes();
  }
};

/// Byte offsets behind those of LowLatencyLayout, in a struct of their own: kernels that do not count take the same parameters with and
/// without it. Of a shape that is not arriving it is empty.
struct LowLatencyCounters {
  std::size_t arrived[2] = {};   ///< u32 [rank][L] pieces of rows from that rank for each local expert, less those expected before
  std::size_t expected[2] = {};  ///< own: u64 [rank][L] count words: pieces that come in the round
  std::size_t bytes = 0;

  LowLatencyCounters() = default;
  LowLatencyCounters(LowLatencyShape const& s, std::size_t begin) : bytes(begin) {
    if (!s.arriving) return;
    DeviceWindowOffsets offsets(begin);
    for (int p = 0; p < 2; ++p) {
      arrived[p] = offsets.take(1, std::int64_t{4} * s.ranks * s.local_experts());
      expected[p] = offsets.take(1, std::int64_t{8} * s.ranks * s.local_experts());
    }
    bytes = offsets.bytes();
  }
};

}  // namespace moe::detail
