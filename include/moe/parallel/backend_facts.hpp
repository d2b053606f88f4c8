// SPDX-License-Identifier: Apache-2.0
// parallel/backend_facts.hpp: what the parallel configuration needs to know of a backend. The library's backends state it as kFacts; a
// backend of the registry must.
#pragma once

#include <cstdint>
#include <string_view>

namespace moe {

/// How a backend's tokens reach the experts.
enum class Transport : std::uint8_t {
  local,       ///< they stay: the rank computes its own experts' part of its own tokens
  gather,      ///< every rank gets all tokens and computes its experts' part of them; the parts are summed over the ranks
  all_to_all,  ///< a token goes to its experts' ranks; its output comes back complete
};

struct BackendFacts {
  std::string_view name{};         ///< the policy's kName
  bool sequence_parallel = false;  ///< expects distinct tokens on every rank, so TP peers split theirs
  bool batched = false;            ///< delivers the batched activation format
  bool asynchronous = false;       ///< sending and waiting of a dispatch or combine can be apart (dual-batch overlap needs this)
  bool translates_ids = false;     ///< maps ids to (owner, local), so that round-robin placement works
  bool sender_split = false;       ///< TP peers with identical tokens split the sends: one lane sends each token
  Transport transport = Transport::all_to_all;
  bool operator==(BackendFacts const&) const = default;
};

/// The backend that a configuration has if it names none; AllGatherReduceScatter::kFacts is this value.
inline constexpr BackendFacts kDefaultBackend{
    .name = "allgather_reduce_scatter", .sequence_parallel = true, .translates_ids = true, .transport = Transport::gather};

}  // namespace moe
