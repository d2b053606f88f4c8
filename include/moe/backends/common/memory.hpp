// SPDX-License-Identifier: Apache-2.0
// backends/common/memory.hpp: how much memory a rank's exchange takes in the host space, for each backend, computed before one is built.
//
// T = max_tokens_per_rank, R ranks, k = top-k, L = most experts of a rank, D = min(k, R) = most ranks of a token. A device exchange
// computes its window itself: LowLatencyCalls, HighThroughputCalls, OneSidedCalls, TwoSidedCalls, PplxCalls::window_bytes().
#pragma once

#include <algorithm>
#include <cstdint>

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
};

/// NoExpertParallel: T quantised rows and T outputs.
constexpr ExchangeMemory no_expert_parallel_memory(ExchangeSize const& s) { return {0, s.max_tokens * (s.row_bytes + s.output_bytes)}; }

/// Naive and AllGatherReduceScatter: records and outputs of all ranks' R T tokens, and T sums in float32 (here: of the outputs' size).
constexpr ExchangeMemory gather_memory(ExchangeSize const& s) {
  return {0, s.ranks * s.max_tokens * (s.record_bytes() + s.output_bytes) + s.max_tokens * s.output_bytes};
}

/// AllToAllV: records and outputs of T D rows sent and of max_recv_rows (R T) rows received.
constexpr ExchangeMemory all_to_all_v_memory(ExchangeSize const& s, std::int64_t max_recv_rows = 0) {
  std::int64_t const received = max_recv_rows == 0 ? s.ranks * s.max_tokens : max_recv_rows;
  return {0, (s.max_tokens * std::min(s.topk, s.ranks) + received) * (s.record_bytes() + s.output_bytes)};
}

/// LowLatency, for each slot and both parities. Window: messages of every (expert, rank), R T L rows, and T k returned outputs. Arena: the
/// packed batches of L experts, R T rows each, with their outputs.
constexpr ExchangeMemory low_latency_memory(ExchangeSize const& s, std::int64_t num_slots = 1) {
  std::int64_t const rows = s.local_experts * s.ranks * s.max_tokens;
  return {2 * num_slots * (rows * (s.row_bytes + 16) + s.max_tokens * s.topk * s.output_bytes),
          2 * num_slots * rows * (s.row_bytes + s.output_bytes + 8)};
}
/// LowLatency with `deduplicate`: R T messages with k ids and k weights, and T D returned outputs; batches as above.
constexpr ExchangeMemory low_latency_deduplicated_memory(ExchangeSize const& s, std::int64_t num_slots = 1) {
  std::int64_t const rows = s.local_experts * s.ranks * s.max_tokens;
  std::int64_t const returned = s.max_tokens * std::min(s.topk, s.ranks);
  return {2 * num_slots * (s.ranks * s.max_tokens * s.record_bytes() + returned * s.output_bytes),
          2 * num_slots * rows * (s.row_bytes + s.output_bytes + 8)};
}

/// HighThroughput, OneSided and LowLatencyRankMajor: records and outputs of max_recv_rows (R T) rows, both parities, all in the window.
constexpr ExchangeMemory high_throughput_memory(ExchangeSize const& s, std::int64_t max_recv_rows = 0) {
  std::int64_t const rows = max_recv_rows == 0 ? s.ranks * s.max_tokens : max_recv_rows;
  return {2 * rows * (s.record_bytes() + s.output_bytes), 2 * s.max_tokens * std::min(s.topk, s.ranks) * 8};
}

/// TwoSided: the queues in the window; in the arena the same rows, both parities, and T D returned outputs.
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

}  // namespace moe::backends
