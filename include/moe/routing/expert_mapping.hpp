// SPDX-License-Identifier: Apache-2.0
// routing/expert_mapping.hpp: logical to physical experts with a replica policy, load recording, and the hook that sees logical ids.
#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

#include "moe/core/array.hpp"
#include "moe/core/error.hpp"
#include "moe/core/host_pool.hpp"
#include "moe/core/types.hpp"

namespace moe::routing {

/// Which replica of an expert a slot uses; rho mod replica_count is its index. docs/semantics/routing.md §9.
enum class ReplicaPolicy : std::uint8_t {
  position,     ///< rho = t k + j, as some stacks do; an expert that is always ranked first never uses replica 1 where k is even
  token,        ///< rho = t + source_rank: the default; spreads over tokens and ranks
  local_first,  ///< the first replica on this rank, else token
  node_first,   ///< the first replica on this node, else token
};
constexpr std::string_view name(ReplicaPolicy p) {
  switch (p) {
    case ReplicaPolicy::position: return "position";
    case ReplicaPolicy::token: return "token";
    case ReplicaPolicy::local_first: return "local_first";
    case ReplicaPolicy::node_first: return "node_first";
  }
  return "?";
}

/// One layer's map from logical to physical experts. Pointers are borrowed, in the memory space that the router runs in.
struct ExpertMapping {
  int num_experts = 0;                                ///< E
  int num_physical = 0;                               ///< P >= E
  int max_replicas = 0;                               ///< columns of logical_to_physical
  std::int32_t const* logical_to_physical = nullptr;  ///< [E, max_replicas]; entries past the count are not read
  std::int32_t const* replica_count = nullptr;        ///< [E]
  ReplicaPolicy policy = ReplicaPolicy::token;
  int source_rank = 0;                             ///< rank that routes
  int ep_size = 1;                                 ///< ranks that share the P physical experts
  int ranks_per_node = 1;                          ///< for node_first
  std::int32_t const* physical_to_rank = nullptr;  ///< [P] owner of a physical expert; null: P / ep_size consecutive ones a rank
};

/// Copies of the fused shared experts, one of each on every rank: a row's columns name those of one rank of `ranks`, which take turns row
/// by row.
struct SharedCopies {
  std::int32_t first = -1;  ///< physical id of fused expert 0 on the first of the ranks, followed by the others' and the next rank's; -1:
                            ///< there are no copies, and the ids are num_experts, num_experts + 1, …
  std::int32_t ranks = 1;
};
/// Id of fused shared expert j of a row, of S.
MOE_HD inline std::int32_t shared_id(SharedCopies const& copies, int num_experts, int s, std::int64_t row, int j) {
  if (copies.first < 0) return num_experts + j;
  return copies.first + static_cast<std::int32_t>(row % copies.ranks) * s + j;
}

/// Counts the slots that each physical expert gets. Counting is exact for any number of threads. A captured graph reads `record` when it
/// runs, so recording can be switched without capturing again.
struct LoadRecorder {
  std::int32_t* load_counter = nullptr;  ///< [P], or null: nothing is recorded
  std::int32_t const* record = nullptr;  ///< one word in the router's space: 0 is off; null: on
};

/// Sees the logical ids of each call, before mapping: for replay and statistics. `observe` runs on the host, inside the call.
struct CaptureHook {
  void (*observe)(void* state, int layer, Rows<std::int32_t const> logical_ids, Rows<float const> weights,
                  std::int64_t num_valid_rows) = nullptr;
  void* state = nullptr;
};

/// Refuses a mapping that cannot be used: E_STATE if a table is missing, E_CONFIG for impossible sizes.
inline void validate(ExpertMapping const& m, LoadRecorder const* recorder = nullptr) {
  auto const missing = [](char const* what) { throw Error(ErrorCode::state, text("EPLB enabled but ", what, " is not set")); };
  if (m.logical_to_physical == nullptr) missing("logical_to_physical");
  if (m.replica_count == nullptr) missing("replica_count");
  if (recorder != nullptr && recorder->load_counter == nullptr) missing("load counter");
  auto const refuse = [](auto const&... parts) { throw Error(ErrorCode::config, text(parts...)); };
  if (m.num_experts < 1) refuse("num_experts: ", m.num_experts, " is below 1");
  if (m.num_physical < m.num_experts) refuse("num_physical: ", m.num_physical, " is below num_experts ", m.num_experts);
  if (m.max_replicas < 1) refuse("max_replicas: ", m.max_replicas, " is below 1");
  if (m.ep_size < 1) refuse("ep_size: ", m.ep_size, " is below 1");
  if (m.ranks_per_node < 1) refuse("ranks_per_node: ", m.ranks_per_node, " is below 1");
  if (m.source_rank < 0 || m.source_rank >= m.ep_size) {
    refuse("source_rank: ", m.source_rank, " is out of range [0, ", m.ep_size, ")");
  }
  if (m.physical_to_rank == nullptr && m.num_physical % m.ep_size != 0) {
    refuse("num_physical: ", m.num_physical, " is not divisible by ep_size ", m.ep_size, " and physical_to_rank is not set");
  }
}

/// Rank that owns a physical expert.
MOE_HD inline int owner_of(ExpertMapping const& m, int physical) {
  return m.physical_to_rank != nullptr ? m.physical_to_rank[physical] : physical / (m.num_physical / m.ep_size);
}

/// Physical expert of slot (t, j) that chose logical expert `id`; -1 if `id` is not an expert. t: row in the call, 64 bits.
MOE_HD inline std::int32_t map_expert(ExpertMapping const& m, std::int32_t id, std::int64_t t, int j, int k) {
  if (id < 0 || id >= m.num_experts) return kNoExpert;
  int const n = m.replica_count[id];
  if (n <= 0) return kNoExpert;
  std::int32_t const* const replicas = m.logical_to_physical + static_cast<std::int64_t>(id) * m.max_replicas;
  if (n == 1) return replicas[0];
  if (m.policy == ReplicaPolicy::local_first || m.policy == ReplicaPolicy::node_first) {
    int const size = m.policy == ReplicaPolicy::local_first ? 1 : m.ranks_per_node;
    for (int r = 0; r < n; ++r) {
      if (owner_of(m, replicas[r]) / size == m.source_rank / size) return replicas[r];
    }
  }
  std::int64_t const rho = m.policy == ReplicaPolicy::position ? t * k + j : t + m.source_rank;
  return replicas[rho % n];
}

/// Maps the first k columns of ids in place (logical in, physical out) and records the load; further columns (fused shared experts) stay as
/// they are and are not counted. Rows at or past num_valid_rows are padding and become -1. `mapping` null: ids are physical already and are
/// only counted. Throws E_INTERNAL in debug builds if an expert has no replica.
inline void map_experts(ExpertMapping const* mapping, LoadRecorder const& recorder, int k, std::int64_t num_valid_rows,
                        Rows<std::int32_t> ids) {
  bool const record = recorder.load_counter != nullptr && (recorder.record == nullptr || *recorder.record != 0);
  std::int64_t const rows = ids.extent(0);
#ifndef NDEBUG
  for (std::int64_t t = 0; mapping != nullptr && t < num_valid_rows; ++t) {
    for (int j = 0; j < k; ++j) {
      std::int32_t const id = ids(t, j);
      if (id >= 0 && id < mapping->num_experts && mapping->replica_count[id] <= 0) {
        throw Error(ErrorCode::internal, text("replica_count: expert ", id, " has ", mapping->replica_count[id], " replicas, at least 1"));
      }
    }
  }
#endif
  HostPool::instance().for_each(rows, 64, rows * k >= 1 << 15 ? host_threads() : 1, [&](std::int64_t t, int) {
    std::int32_t* const row = row_ptr(ids, t);
    for (int j = 0; j < k; ++j) {
      std::int32_t const id = t < num_valid_rows ? row[j] : kNoExpert;
      row[j] = mapping == nullptr ? id : map_expert(*mapping, id, t, j, k);
      if (record && row[j] >= 0) std::atomic_ref<std::int32_t>(recorder.load_counter[row[j]]).fetch_add(1, std::memory_order_relaxed);
    }
  });
}

}  // namespace moe::routing
