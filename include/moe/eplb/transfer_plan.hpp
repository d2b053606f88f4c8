// SPDX-License-Identifier: Apache-2.0
// eplb/transfer_plan.hpp: who sends which expert to whom when one layer's map changes, computed identically on every rank from the two
// maps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/eplb/maps.hpp"

namespace moe::eplb {

/// One expert's weights going from one rank to another. Slots are physical (of the whole group).
struct Flow {
  std::int32_t expert;
  std::int32_t source_rank;
  std::int32_t source_slot;  ///< first old physical id of the expert on the source rank
  std::int32_t destination_rank;
  std::int32_t destination_slot;  ///< first new physical id on the destination rank that needs it
  bool operator==(Flow const&) const = default;
};

/// Weights copied inside a rank: from an old expert slot's weights into a new expert slot's buffer, or from one buffer slot to another.
struct SlotCopy {
  std::int32_t expert;
  std::int32_t source_slot;
  std::int32_t destination_slot;
  bool operator==(SlotCopy const&) const = default;
};

/// The work of one rank for one layer. This order needs one spare buffer of L expert slots and never overwrites data that is still read:
/// local_copies (weights → buffer), sends (from weights) and receives (→ buffer), wait for this rank's transfers, duplicates (buffer →
/// buffer), then commits (buffer[slot] → weights[slot]). With pulls over peer memory, a barrier before the sends and one before the
/// commits.
struct RankPlan {
  std::vector<SlotCopy> local_copies;
  std::vector<Flow> sends;
  std::vector<Flow> receives;
  std::vector<SlotCopy> duplicates;
  std::vector<std::int32_t> commits;  ///< new expert slots whose content changes, ascending: also the buffer slots in use
  bool empty() const { return local_copies.empty() && sends.empty() && receives.empty() && duplicates.empty() && commits.empty(); }
  bool operator==(RankPlan const&) const = default;
};

/// Options of the plan.
struct TransferOptions {
  /// [R]: node of each rank. If given, an expert is sent by a rank of the receiver's node if one holds it.
  std::vector<int> node_of_rank{};
};

namespace detail {

/// Receiver j of n gets from sender i of m: i serves [i q, (i + 1) q) with q = n div m, and the first n mod m senders one more.
inline std::size_t sender_of(std::size_t receiver, std::size_t num_receivers, std::size_t num_senders) {
  std::size_t const each = num_receivers / num_senders;
  return receiver < each * num_senders ? receiver / each : receiver - each * num_senders;
}

/// Per expert: ranks in order of first occurrence, with the physical id of that occurrence.
struct Holder {
  std::int32_t rank;
  std::int32_t slot;
};
using Holders = std::vector<std::vector<Holder>>;

inline bool has_rank(std::vector<Holder> const& holders, std::int32_t rank) {
  return std::any_of(holders.begin(), holders.end(), [rank](Holder const& h) { return h.rank == rank; });
}

inline Holders holders_of(std::span<std::int32_t const> expert_of_slot, int num_logical, int slots_per_rank) {
  Holders out(static_cast<std::size_t>(num_logical));
  for (std::size_t s = 0; s < expert_of_slot.size(); ++s) {
    std::int32_t const e = expert_of_slot[s];
    if (e == kEmptySlot) continue;
    if (e < 0 || e >= num_logical) {
      throw Error(ErrorCode::argument, text("expert ", e, " at physical id ", s, " is out of range [0, ", num_logical, ")"));
    }
    std::int32_t const rank = static_cast<std::int32_t>(s) / slots_per_rank;
    auto& ranks = out[static_cast<std::size_t>(e)];
    if (!has_rank(ranks, rank)) ranks.push_back({rank, static_cast<std::int32_t>(s)});
  }
  return out;
}

inline void match(std::int32_t expert, std::vector<Holder> const& senders, std::vector<Holder> const& receivers, std::vector<Flow>& flows) {
  for (std::size_t j = 0; j < receivers.size(); ++j) {
    Holder const& from = senders[sender_of(j, receivers.size(), senders.size())];
    flows.push_back({expert, from.rank, from.slot, receivers[j].rank, receivers[j].slot});
  }
}

}  // namespace detail

/// The flows of one layer, by expert, then by receiver. old_map, new_map [P]: the logical expert of every physical id, -1 where a rank is
/// joining (receives only) or leaving (sends only). A pure function, so that both ends know every flow without negotiation. E_ARG: maps of
/// different length, P % R != 0, an id out of range, a new expert that no rank holds (names expert and physical id).
inline std::vector<Flow> plan_flows(std::span<std::int32_t const> old_map, std::span<std::int32_t const> new_map, int num_logical,
                                    int num_ranks, TransferOptions const& options = {}) {
  if (old_map.size() != new_map.size() || num_ranks < 1 || old_map.size() % static_cast<std::size_t>(num_ranks) != 0) {
    throw Error(ErrorCode::argument, text("maps of ", old_map.size(), " and ", new_map.size(), " expert slots on ", num_ranks, " ranks"));
  }
  if (!options.node_of_rank.empty() && options.node_of_rank.size() != static_cast<std::size_t>(num_ranks)) {
    throw Error(ErrorCode::argument, text("node_of_rank has ", options.node_of_rank.size(), " entries for ", num_ranks, " ranks"));
  }
  int const slots_per_rank = static_cast<int>(old_map.size()) / num_ranks;
  detail::Holders const before = detail::holders_of(old_map, num_logical, slots_per_rank);
  detail::Holders const after = detail::holders_of(new_map, num_logical, slots_per_rank);
  std::vector<Flow> flows;
  for (std::int32_t e = 0; e < num_logical; ++e) {
    auto const& senders = before[static_cast<std::size_t>(e)];
    std::vector<detail::Holder> receivers;
    for (detail::Holder const& h : after[static_cast<std::size_t>(e)]) {
      if (!detail::has_rank(senders, h.rank)) receivers.push_back(h);
    }
    if (receivers.empty()) continue;
    if (senders.empty()) {
      throw Error(ErrorCode::argument, text("expert ", e, " for physical id ", receivers.front().slot, " is on no rank in the old map"));
    }
    if (options.node_of_rank.empty()) {
      detail::match(e, senders, receivers, flows);
      continue;
    }
    auto const node = [&](detail::Holder const& h) { return options.node_of_rank[static_cast<std::size_t>(h.rank)]; };
    std::vector<detail::Holder> far;
    while (!receivers.empty()) {
      int const here = node(receivers.front());
      auto const on_node = [&](detail::Holder const& h) { return node(h) == here; };
      std::vector<detail::Holder> near_senders, near_receivers;
      std::copy_if(senders.begin(), senders.end(), std::back_inserter(near_senders), on_node);
      std::copy_if(receivers.begin(), receivers.end(), std::back_inserter(near_receivers), on_node);
      receivers.erase(std::remove_if(receivers.begin(), receivers.end(), on_node), receivers.end());
      if (near_senders.empty()) {
        far.insert(far.end(), near_receivers.begin(), near_receivers.end());
      } else {
        detail::match(e, near_senders, near_receivers, flows);
      }
    }
    detail::match(e, senders, far, flows);
  }
  return flows;
}

/// One rank's part of plan_flows(old_map, new_map, …), whose result `flows` is. E_ARG on a rank outside [0, R).
inline RankPlan plan_rank(std::span<Flow const> flows, std::span<std::int32_t const> old_map, std::span<std::int32_t const> new_map,
                          int num_ranks, int rank) {
  if (rank < 0 || rank >= num_ranks) throw Error(ErrorCode::argument, text("rank ", rank, " is out of range [0, ", num_ranks, ")"));
  RankPlan plan;
  for (Flow const& flow : flows) {
    if (flow.source_rank == rank) plan.sends.push_back(flow);
    if (flow.destination_rank == rank) plan.receives.push_back(flow);
  }
  int const slots_per_rank = static_cast<int>(old_map.size()) / num_ranks;
  int const first = rank * slots_per_rank;
  auto const mine = old_map.subspan(static_cast<std::size_t>(first), static_cast<std::size_t>(slots_per_rank));
  for (std::int32_t slot = first; slot < first + slots_per_rank; ++slot) {
    std::int32_t const e = new_map[static_cast<std::size_t>(slot)];
    if (e == kEmptySlot || e == old_map[static_cast<std::size_t>(slot)]) continue;
    plan.commits.push_back(slot);
    auto const held = std::find(mine.begin(), mine.end(), e);
    if (held != mine.end()) {
      plan.local_copies.push_back({e, first + static_cast<std::int32_t>(held - mine.begin()), slot});
      continue;
    }
    auto const received = std::find_if(plan.receives.begin(), plan.receives.end(), [e](Flow const& f) { return f.expert == e; });
    if (received->destination_slot != slot) plan.duplicates.push_back({e, received->destination_slot, slot});
  }
  return plan;
}

/// The same from the maps alone. Arguments and errors as plan_flows.
inline RankPlan plan_rank(std::span<std::int32_t const> old_map, std::span<std::int32_t const> new_map, int num_logical, int num_ranks,
                          int rank, TransferOptions const& options = {}) {
  return plan_rank(plan_flows(old_map, new_map, num_logical, num_ranks, options), old_map, new_map, num_ranks, rank);
}

/// All messages from one rank to another, coalesced. Transfer rounds hold such pairs.
struct Message {
  std::int32_t source_rank;
  std::int32_t destination_rank;
  std::vector<Flow> flows;
};

/// The flows in transfer rounds, in which every rank sends to at most one peer and receives from at most one, so that what is in flight is
/// bounded. Their number is the least possible: the largest number of peers that a rank sends to or receives from
/// (bipartite edge colouring, König).
inline std::vector<std::vector<Message>> schedule_rounds(std::span<Flow const> flows, int num_ranks) {
  auto const ranks = static_cast<std::size_t>(num_ranks);
  std::vector<Message> messages;
  std::vector<std::int32_t> message_of(ranks * ranks, -1);
  std::vector<int> sends(ranks, 0), receives(ranks, 0);
  for (Flow const& flow : flows) {
    auto const from = static_cast<std::size_t>(flow.source_rank);
    auto const to = static_cast<std::size_t>(flow.destination_rank);
    std::int32_t& index = message_of[from * ranks + to];
    if (index < 0) {
      index = static_cast<std::int32_t>(messages.size());
      messages.push_back({flow.source_rank, flow.destination_rank, {}});
      ++sends[from];
      ++receives[to];
    }
    messages[static_cast<std::size_t>(index)].flows.push_back(flow);
  }
  if (messages.empty()) return {};
  auto const rounds = static_cast<std::size_t>(
      std::max(*std::max_element(sends.begin(), sends.end()), *std::max_element(receives.begin(), receives.end())));

  // to_in[s][c]: destination of s in round c; from_in[d][c]: source of d in round c; -1 free.
  std::vector<std::vector<std::int32_t>> to_in(ranks, std::vector<std::int32_t>(rounds, -1)), from_in = to_in;
  auto const free_round = [](std::vector<std::int32_t> const& used) {
    return static_cast<std::size_t>(std::find(used.begin(), used.end(), -1) - used.begin());
  };
  for (Message const& message : messages) {
    auto const s = static_cast<std::size_t>(message.source_rank);
    auto const d = static_cast<std::size_t>(message.destination_rank);
    std::size_t const a = free_round(to_in[s]);    // free at the source
    std::size_t const b = free_round(from_in[d]);  // free at the destination
    if (from_in[d][a] != -1) {
      // Round a is in use at d: swap rounds a and b along the path that starts at d with round a. It does not reach s, where a is free.
      std::vector<std::pair<std::size_t, std::size_t>> path;  // (source, destination), alternately in round a and b
      std::size_t destination = d;
      while (from_in[destination][a] != -1) {
        auto const source = static_cast<std::size_t>(from_in[destination][a]);
        path.emplace_back(source, destination);
        if (to_in[source][b] == -1) break;
        destination = static_cast<std::size_t>(to_in[source][b]);
        path.emplace_back(source, destination);
      }
      for (std::size_t i = 0; i < path.size(); ++i) {
        std::size_t const was = i % 2 == 0 ? a : b;
        to_in[path[i].first][was] = from_in[path[i].second][was] = -1;
      }
      for (std::size_t i = 0; i < path.size(); ++i) {
        std::size_t const becomes = i % 2 == 0 ? b : a;
        to_in[path[i].first][becomes] = static_cast<std::int32_t>(path[i].second);
        from_in[path[i].second][becomes] = static_cast<std::int32_t>(path[i].first);
      }
    }
    to_in[s][a] = static_cast<std::int32_t>(d);
    from_in[d][a] = static_cast<std::int32_t>(s);
  }

  std::vector<std::vector<Message>> out(rounds);
  for (std::size_t s = 0; s < ranks; ++s) {
    for (std::size_t c = 0; c < rounds; ++c) {
      if (to_in[s][c] < 0) continue;
      out[c].push_back(messages[static_cast<std::size_t>(message_of[s * ranks + static_cast<std::size_t>(to_in[s][c])])]);
    }
  }
  return out;
}

}  // namespace moe::eplb
