// SPDX-License-Identifier: Apache-2.0
// backends/common/memory.hpp: how much memory a rank's exchange takes, for each backend, computed before one is built: first in the host
// space, then the windows between GPUs.
//
// T = max_tokens_per_rank, R ranks, k = top-k, L = most experts of a rank, F = min(k, R) = most ranks of a token.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>

#include "moe/core/error.hpp"

namespace moe::backends {

/// The sizes that decide an exchange's memory.
struct ExchangeSize {
  std::int64_t ranks = 1;
  std::int64_t max_tokens = 0;
  std::int64_t topk = 1;
  std::int64_t local_experts = 1;  ///< of any rank, at most
  std::int64_t row_bytes = 0;      ///< a quantised row with its scales
  std::int64_t output_bytes = 0;   ///< a row of expert outputs: hidden elements of the experts' output type
  /// A row with its k weights and k ids.
  constexpr std::int64_t record_bytes() const { return row_bytes + 8 * topk; }
};

/// Bytes of one rank, without parts that do not grow with T times a row: counts, flags, maps, alignment.
struct ExchangeMemory {
  std::int64_t window = 0;
  std::int64_t arena = 0;
  constexpr std::int64_t total() const { return window + arena; }
};

/// NoExpertParallel: T quantised rows and T outputs.
constexpr ExchangeMemory no_expert_parallel_memory(ExchangeSize const& s) { return {0, s.max_tokens * (s.row_bytes + s.output_bytes)}; }

/// Naive and AllGatherReduceScatter: records and outputs of all ranks' R T tokens, and T sums in float32 (here: of the outputs' size).
constexpr ExchangeMemory gather_memory(ExchangeSize const& s) {
  return {0, s.ranks * s.max_tokens * (s.record_bytes() + s.output_bytes) + s.max_tokens * s.output_bytes};
}

/// AllToAllV: records and outputs of T F rows sent and of max_recv_rows (R T) rows received.
constexpr ExchangeMemory all_to_all_v_memory(ExchangeSize const& s, std::int64_t max_recv_rows = 0) {
  std::int64_t const received = max_recv_rows == 0 ? s.ranks * s.max_tokens : max_recv_rows;
  return {0, (s.max_tokens * std::min(s.topk, s.ranks) + received) * (s.record_bytes() + s.output_bytes)};
}

/// LowLatency, for each buffer set and both parities. Window: messages of every (expert, rank), R T L rows, and T k returned outputs.
/// Arena: the packed batches of L experts, R T rows each, with their outputs.
constexpr ExchangeMemory low_latency_memory(ExchangeSize const& s, std::int64_t num_buffer_sets = 1) {
  std::int64_t const rows = s.local_experts * s.ranks * s.max_tokens;
  return {2 * num_buffer_sets * (rows * (s.row_bytes + 16) + s.max_tokens * s.topk * s.output_bytes),
          2 * num_buffer_sets * rows * (s.row_bytes + s.output_bytes + 8)};
}
/// LowLatency with `deduplicate`: R T messages with k ids and k weights, and T F returned outputs; batches as above.
constexpr ExchangeMemory low_latency_deduplicated_memory(ExchangeSize const& s, std::int64_t num_buffer_sets = 1) {
  std::int64_t const rows = s.local_experts * s.ranks * s.max_tokens;
  std::int64_t const returned = s.max_tokens * std::min(s.topk, s.ranks);
  return {2 * num_buffer_sets * (s.ranks * s.max_tokens * s.record_bytes() + returned * s.output_bytes),
          2 * num_buffer_sets * rows * (s.row_bytes + s.output_bytes + 8)};
}

/// HighThroughput, OneSided and LowLatencyRankMajor: records and outputs of max_recv_rows (R T) rows, both parities, all in the window.
constexpr ExchangeMemory high_throughput_memory(ExchangeSize const& s, std::int64_t max_recv_rows = 0) {
  std::int64_t const rows = max_recv_rows == 0 ? s.ranks * s.max_tokens : max_recv_rows;
  return {2 * rows * (s.record_bytes() + s.output_bytes), 2 * s.max_tokens * std::min(s.topk, s.ranks) * 8};
}

/// TwoSided: the queues in the window; in the arena the same rows, both parities, and T F returned outputs.
constexpr ExchangeMemory two_sided_memory(ExchangeSize const& s, std::int64_t queue_depth, std::int64_t queue_entry_bytes,
                                          std::int64_t max_recv_rows = 0) {
  std::int64_t const rows = max_recv_rows == 0 ? s.ranks * s.max_tokens : max_recv_rows;
  return {s.ranks * queue_depth * queue_entry_bytes,
          2 * rows * (s.record_bytes() + s.output_bytes) + s.max_tokens * std::min(s.topk, s.ranks) * s.output_bytes};
}

/// Pplx: messages of every (rank, expert), R L T rows, and T k returned outputs, both parities. Arena: batches of T rows for each expert
/// and data-parallel group, with their outputs.
constexpr ExchangeMemory pplx_memory(ExchangeSize const& s, std::int64_t dp_size = 1) {
  return {2 * (s.ranks * s.local_experts * s.max_tokens * (s.row_bytes + 16) + s.max_tokens * s.topk * s.output_bytes),
          s.local_experts * s.max_tokens * (s.ranks / dp_size) * (s.row_bytes + s.output_bytes + 8)};
}

/// The sizes that decide the window of an exchange between GPUs, which holds rows, batches and outputs. Outputs travel in bf16.
struct DeviceExchangeSize {
  std::int64_t ranks = 1;
  std::int64_t max_tokens = 0;
  std::int64_t topk = 1;
  std::int64_t local_experts = 1;  ///< of any rank, at most
  std::int64_t hidden = 0;
  bool fp8 = true;  ///< rows are e4m3 with a float scale for 128 values; else bf16
  constexpr std::int64_t scale_bytes() const { return fp8 ? (hidden + 127) / 128 * 4 : 0; }
  /// A row with its scales.
  constexpr std::int64_t row_bytes() const { return (fp8 ? hidden : 2 * hidden) + scale_bytes(); }
  /// The same where the scales take whole 128-byte lines.
  constexpr std::int64_t line_row_bytes() const { return row_bytes() - scale_bytes() + (scale_bytes() + 127) / 128 * 128; }
  constexpr std::int64_t output_bytes() const { return 2 * hidden; }
  constexpr std::int64_t rows() const { return ranks * max_tokens; }                        ///< R T
  constexpr std::int64_t batch_rows() const { return local_experts * ranks * max_tokens; }  ///< L R T
};

/// LowLatency between GPUs, bytes of the window: for each buffer set and both parities L batches of R T rows with their outputs and
/// sources, and the position of each choice. `masks`: a second index. `coded_bytes`: of an output in its format, with its headers; 0: bf16.
constexpr std::int64_t low_latency_window(DeviceExchangeSize const& s, std::int64_t num_buffer_sets = 1, bool masks = false,
                                          std::int64_t coded_bytes = 0) {
  std::int64_t const output = coded_bytes == 0 ? s.output_bytes() : coded_bytes;
  return 2 * num_buffer_sets * (s.batch_rows() * (s.row_bytes() + output + (masks ? 8 : 4)) + 4 * s.max_tokens * s.topk);
}
/// LowLatency with `deduplicate`, and LowLatencyRankMajor: R T rows with k positions and k weights and their outputs, and the index of L
/// batches.
constexpr std::int64_t low_latency_deduplicated_window(DeviceExchangeSize const& s, std::int64_t num_buffer_sets = 1,
                                                       std::int64_t coded_bytes = 0) {
  std::int64_t const output = coded_bytes == 0 ? s.output_bytes() : coded_bytes;
  return 2 * num_buffer_sets * (s.rows() * (s.row_bytes() + output + 8 * s.topk + 4) + 4 * s.batch_rows() + 4 * s.max_tokens * s.topk);
}
/// HighThroughput: rows with ids, weights and positions in records of whole 32 bytes, their outputs, and a list by expert; `capacity` rows
/// (R T). `alignment`: of an expert's part of the list; 0: no list.
constexpr std::int64_t high_throughput_window(DeviceExchangeSize const& s, std::int64_t capacity = 0, std::int64_t alignment = 1) {
  std::int64_t const rows = capacity == 0 ? s.rows() : capacity;
  std::int64_t const record = ((alignment > 0 ? 3 : 2) * s.topk + 1 + 7) / 8 * 32;
  std::int64_t const list = alignment > 0 ? 4 * (rows * s.topk + s.local_experts * (alignment - 1)) : 0;
  return 2 * (rows * (s.line_row_bytes() + s.output_bytes() + record) + list + 4 * s.max_tokens * (s.ranks + s.topk));
}
/// OneSided: R T rows with ids and weights, and their outputs.
constexpr std::int64_t one_sided_window(DeviceExchangeSize const& s) {
  return 2 * (s.rows() * (s.line_row_bytes() + s.output_bytes() + 8 * s.topk) + 4 * s.max_tokens * s.topk);
}
/// TwoSided: the same rows, T F returned outputs, and `queues` between each two ranks.
constexpr std::int64_t two_sided_window(DeviceExchangeSize const& s, std::int64_t queues, std::int64_t queue_depth,
                                        std::int64_t queue_entry_bytes) {
  return 2 * s.rows() * (s.line_row_bytes() + s.output_bytes() + 8 * s.topk + 8) +
         s.max_tokens * std::min(s.topk, s.ranks) * s.output_bytes() + queues * s.ranks * queue_depth * queue_entry_bytes;
}
/// Pplx: rows of every (rank, expert) as they arrive, the batches packed from them, their outputs, and T k returned outputs. Ranks of a
/// group of `dp_size` share its T tokens.
constexpr std::int64_t pplx_window(DeviceExchangeSize const& s, std::int64_t dp_size = 1) {
  std::int64_t const rows = s.ranks * s.local_experts * ((s.max_tokens + dp_size - 1) / dp_size);
  return 2 * (rows * (s.line_row_bytes() + s.row_bytes() + s.output_bytes() + 8) + s.max_tokens * s.topk * (s.output_bytes() + 4));
}

/// Largest max_tokens with which `bytes(size)` is at most `limit`; 0 if none. Size: ExchangeSize or DeviceExchangeSize.
template <class Size, class Bytes>
constexpr std::int64_t largest_max_tokens(Size size, std::int64_t limit, Bytes const& bytes) {
  std::int64_t fits = 0;
  std::int64_t too_many = size.max_tokens + 1;
  while (too_many - fits > 1) {
    size.max_tokens = fits + (too_many - fits) / 2;
    (bytes(size) <= limit ? fits : too_many) = size.max_tokens;
  }
  return fits;
}

/// E_CONFIG with the bytes needed and the largest max_tokens_per_rank that fits, if `bytes(size)` exceeds `limit` (free memory, or what a
/// transport can address).
template <class Size, class Bytes>
void check_memory(std::string_view backend, Size const& size, std::int64_t limit, Bytes const& bytes) {
  std::int64_t const needed = bytes(size);
  if (needed <= limit) return;
  throw Error(ErrorCode::config, text(backend, ": ", needed, " bytes needed, ", limit, " available, for max_tokens_per_rank = ",
                                      size.max_tokens, ", local_experts = ", size.local_experts, ", ranks = ", size.ranks,
                                      "; the largest max_tokens_per_rank that fits is ", largest_max_tokens(size, limit, bytes)));
}

}  // namespace moe::backends
