// SPDX-License-Identifier: Apache-2.0
// parallel/placement.hpp: which rank owns which physical expert, and where in that rank's weights it lies.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"

namespace moe {

/// How the physical experts are distributed over the ranks of the EP group (without load balancing).
enum class PlacementStrategy : std::uint8_t {
  linear,       ///< rank r owns consecutive experts; the first num_experts % ep_size ranks own one more
  round_robin,  ///< rank r owns r, r + ep_size, r + 2 ep_size, …: spreads the groups of a grouped router over the ranks
};

/// "linear" or "round_robin".
constexpr std::string_view name(PlacementStrategy strategy) { return strategy == PlacementStrategy::linear ? "linear" : "round_robin"; }

/// The strategy of that name. E_CONFIG on any other name.
inline PlacementStrategy parse_placement_strategy(std::string_view text_name) {
  for (PlacementStrategy strategy : {PlacementStrategy::linear, PlacementStrategy::round_robin}) {
    if (text_name == name(strategy)) return strategy;
  }
  throw Error(ErrorCode::config, text("unsupported expert placement strategy \"", text_name, "\"; known: linear, round_robin"));
}

/// A physical expert that changes its owner when the EP group is resized.
struct OwnerChange {
  std::int32_t physical;
  std::int32_t old_owner;
  std::int32_t new_owner;
  bool operator==(OwnerChange const&) const = default;
};

/// The placement of P physical experts on R ranks: every expert has exactly one (owner rank, local id).
/// Host memory, a value: equal arguments give equal placements on every rank. Formulas: the field's linear and round-robin maps.
class ExpertPlacement {
 public:
  /// num_experts: physical experts P of the whole EP group (= logical experts without redundancy); ep_size: ranks R.
  /// E_CONFIG if either is below 1, or if there are more ranks than experts and allow_empty_ranks is false.
  ExpertPlacement(int num_experts, int ep_size, PlacementStrategy strategy = PlacementStrategy::linear, bool allow_empty_ranks = false)
      : strategy_(strategy), allow_empty_ranks_(allow_empty_ranks), num_logical_(num_experts) {
    check_sizes(num_experts, ep_size, allow_empty_ranks);
    deal(num_experts, ep_size);
  }

  /// A placement with redundancy or from a file: physical_to_logical[p] is the logical expert of physical expert p, and rank r owns the
  /// physical experts [r P/R, (r+1) P/R). E_CONFIG if P % R != 0; E_ARG if an id lies outside [0, num_logical) or a logical expert is
  /// missing.
  static ExpertPlacement from_physical_to_logical(std::span<std::int32_t const> physical_to_logical, int num_logical, int ep_size) {
    int const num_physical = static_cast<int>(physical_to_logical.size());
    check_sizes(num_physical, ep_size, false);
    if (num_physical % ep_size != 0) {
      throw Error(ErrorCode::config, text("P must be divisible by ep_size: P = ", num_physical, ", ep_size = ", ep_size));
    }
    std::vector<std::int32_t> copies(static_cast<std::size_t>(std::max(num_logical, 0)), 0);
    for (int p = 0; p < num_physical; ++p) {
      std::int32_t const e = physical_to_logical[static_cast<std::size_t>(p)];
      if (e < 0 || e >= num_logical) {
        throw Error(ErrorCode::argument,
                    text("physical_to_logical: logical expert ", e, " at physical id ", p, " is out of range [0, ", num_logical, ")"));
      }
      ++copies[static_cast<std::size_t>(e)];
    }
    auto const missing = std::find(copies.begin(), copies.end(), 0);
    if (missing != copies.end()) {
      throw Error(ErrorCode::argument, text("physical_to_logical: logical expert ", missing - copies.begin(), " has no physical expert"));
    }
    ExpertPlacement placement(num_physical, ep_size);
    placement.num_logical_ = num_logical;
    placement.physical_to_logical_.assign(physical_to_logical.begin(), physical_to_logical.end());
    return placement;
  }

  /// The same with `count` further experts on every rank, fused shared ones: physical P + r count + i is local num_local(r) + i of rank r,
  /// a copy of logical expert num_logical() + i.
  ExpertPlacement with_shared(int count) const {
    ExpertPlacement out = *this;
    for (int r = 0; r < ep_size(); ++r) {
      for (int i = 0; i < count; ++i) {
        out.owner_.push_back(r);
        out.local_.push_back(num_local(r) + i);
        out.physical_to_logical_.push_back(num_logical_ + i);
      }
      out.num_local_[static_cast<std::size_t>(r)] += count;
    }
    out.num_logical_ += count;
    std::exclusive_scan(out.num_local_.begin(), out.num_local_.end(), out.first_.begin(), 0);
    out.by_place_.resize(out.owner_.size());
    for (std::size_t p = 0; p < out.owner_.size(); ++p) {
      auto const first = static_cast<std::size_t>(out.first_[static_cast<std::size_t>(out.owner_[p])]);
      auto const place = first + static_cast<std::size_t>(out.local_[p]);
      out.by_place_[place] = static_cast<std::int32_t>(p);
    }
    return out;
  }

  int num_physical() const { return static_cast<int>(owner_.size()); }
  int num_logical() const { return num_logical_; }
  int ep_size() const { return static_cast<int>(num_local_.size()); }
  PlacementStrategy strategy() const { return strategy_; }

  /// Rank that owns physical expert p, p in [0, P).
  int owner(int p) const { return owner_[static_cast<std::size_t>(p)]; }
  /// Index of physical expert p in its owner's weights.
  int local(int p) const { return local_[static_cast<std::size_t>(p)]; }
  /// Logical expert of physical expert p.
  int logical(int p) const { return physical_to_logical_[static_cast<std::size_t>(p)]; }
  /// Physical experts that the rank owns (0 possible with allow_empty_ranks).
  int num_local(int rank) const { return num_local_[checked_rank(rank)]; }
  /// Largest num_local of any rank.
  int max_num_local() const { return *std::max_element(num_local_.begin(), num_local_.end()); }
  /// All ranks own the same number of experts.
  bool is_even() const { return num_physical() == max_num_local() * ep_size(); }
  /// With one rank every physical id is its local id and consumers need no map.
  bool needs_map() const { return ep_size() > 1; }

  /// owner(p) and local(p) of every p, [P]; logical(p), [P]; num_local of every rank, [R].
  std::vector<std::int32_t> const& owners() const { return owner_; }
  std::vector<std::int32_t> const& locals() const { return local_; }
  std::vector<std::int32_t> const& physical_to_logical() const { return physical_to_logical_; }
  std::vector<std::int32_t> const& num_locals() const { return num_local_; }

  /// [P]: physical → local id on this rank, -1 where the expert lives elsewhere. E_ARG on a rank outside [0, R).
  std::vector<std::int32_t> expert_map(int rank) const {
    std::vector<std::int32_t> map(owner_.size(), -1);
    for (std::int32_t p : local_to_physical(rank)) map[static_cast<std::size_t>(p)] = local(p);
    return map;
  }

  /// [num_local(rank)]: local → physical id, ascending. A view into this object.
  std::span<std::int32_t const> local_to_physical(int rank) const {
    std::size_t const r = checked_rank(rank);
    return std::span(by_place_).subspan(static_cast<std::size_t>(first_[r]), static_cast<std::size_t>(num_local_[r]));
  }

  /// [P + num_fused_shared + 1]: 1 where the expert is computed on this rank (fused shared experts always), the last entry 0: it
  /// is the sentinel that the invalid id P + num_fused_shared points at.
  std::vector<std::int32_t> expert_mask(int rank, int num_fused_shared = 0) const {
    if (num_fused_shared < 0) {
      throw Error(ErrorCode::argument, text("num_fused_shared must be at least 0, is ", num_fused_shared));
    }
    std::vector<std::int32_t> mask(owner_.size() + static_cast<std::size_t>(num_fused_shared) + 1, 0);
    for (std::int32_t p : local_to_physical(rank)) mask[static_cast<std::size_t>(p)] = 1;
    std::fill_n(mask.begin() + num_physical(), num_fused_shared, 1);
    return mask;
  }

  /// [P]: physical id → its place when experts are numbered rank by rank (owner-major, then local). For exchanges of the
  /// user's own that compute rank = id / L: their ids go through this map, in dispatch and combine alike.
  std::vector<std::int32_t> placement_order() const {
    std::vector<std::int32_t> order(owner_.size());
    for (std::size_t p = 0; p < order.size(); ++p) order[p] = first_[static_cast<std::size_t>(owner_[p])] + local_[p];
    return order;
  }
  /// [P]: inverse of placement_order().
  std::vector<std::int32_t> const& inverse_placement_order() const { return by_place_; }
  /// placement_order() is the identity, so the remap must be skipped.
  bool is_identity_order() const { return std::is_sorted(by_place_.begin(), by_place_.end()); }

  /// [P]: ids for an exchange that computes rank = id / L with one L for all ranks: owner · L_max + local. If P % R != 0 the
  /// exchange must accept empty expert slots (accepts_empty_slots), else E_UNSUPPORTED.
  std::vector<std::int32_t> even_slot_ids(bool accepts_empty_slots) const {
    if (!is_even() && !accepts_empty_slots) {
      throw Error(ErrorCode::unsupported, text("this exchange needs E % R = 0: E = ", num_physical(), ", R = ", ep_size()));
    }
    std::vector<std::int32_t> ids(owner_.size());
    for (std::size_t p = 0; p < ids.size(); ++p) ids[p] = owner_[p] * max_num_local() + local_[p];
    return ids;
  }

  /// Redistributes the experts over new_ep_size ranks and returns those that change their owner, by physical id. Only between steps: any
  /// live dispatch handle is E_STATE; sizes are checked as in the constructor. On error the placement is unchanged.
  std::vector<OwnerChange> update(int new_ep_size, int live_handles = 0) {
    if (live_handles != 0) {
      throw Error(ErrorCode::state, text("placement cannot change while ", live_handles, " dispatch handles are alive"));
    }
    check_sizes(num_physical(), new_ep_size, allow_empty_ranks_);
    std::vector<std::int32_t> const before = owner_;
    deal(num_physical(), new_ep_size);
    std::vector<OwnerChange> changes;
    for (std::size_t p = 0; p < before.size(); ++p) {
      if (before[p] != owner_[p]) changes.push_back({static_cast<std::int32_t>(p), before[p], owner_[p]});
    }
    return changes;
  }

  /// One line per rank, local -> physical, runs folded: "rank 0: 3 experts: 0->0, 1->4, 2->8" or "rank 1: 4 experts: 0-3->4-7".
  std::string report() const {
    std::string out;
    for (int rank = 0; rank < ep_size(); ++rank) out += report(rank) + '\n';
    return out;
  }
  /// The line of one rank, without a newline.
  std::string report(int rank) const {
    std::span<std::int32_t const> const ids = local_to_physical(rank);
    std::string out = text("rank ", rank, ": ", ids.size(), ids.size() == 1 ? " expert" : " experts");
    for (std::size_t i = 0, next; i < ids.size(); i = next) {
      for (next = i + 1; next < ids.size() && ids[next] == ids[next - 1] + 1;) ++next;
      out += i == 0 ? ": " : ", ";
      if (next - i == 1) {
        out += text(i, "->", ids[i]);
      } else {
        out += text(i, "-", next - 1, "->", ids[i], "-", ids[next - 1]);
      }
    }
    return out;
  }

  bool operator==(ExpertPlacement const& other) const {
    return owner_ == other.owner_ && local_ == other.local_ && num_local_ == other.num_local_ &&
           physical_to_logical_ == other.physical_to_logical_;
  }

 private:
  static void check_sizes(int num_experts, int ep_size, bool allow_empty_ranks) {
    if (num_experts < 1) throw Error(ErrorCode::config, text("num_experts must be at least 1, is ", num_experts));
    if (ep_size < 1) throw Error(ErrorCode::config, text("ep_size must be at least 1, is ", ep_size));
    if (num_experts < ep_size && !allow_empty_ranks) {
      throw Error(ErrorCode::config, text("more ranks than experts: ep_size = ", ep_size, ", num_experts = ", num_experts,
                                          "; allow_empty_ranks permits ranks that compute nothing"));
    }
  }

  std::size_t checked_rank(int rank) const {
    if (rank < 0 || rank >= ep_size()) {
      throw Error(ErrorCode::argument, text("rank ", rank, " is out of range [0, ", ep_size(), ")"));
    }
    return static_cast<std::size_t>(rank);
  }

  void deal(int num_experts, int ep_size) {
    int const base = num_experts / ep_size;
    int const rem = num_experts % ep_size;
    num_local_.resize(static_cast<std::size_t>(ep_size));
    for (int r = 0; r < ep_size; ++r) num_local_[static_cast<std::size_t>(r)] = base + (r < rem ? 1 : 0);
    first_.resize(num_local_.size());
    std::exclusive_scan(num_local_.begin(), num_local_.end(), first_.begin(), 0);

    owner_.resize(static_cast<std::size_t>(num_experts));
    local_.resize(owner_.size());
    by_place_.resize(owner_.size());
    for (int r = 0; r < ep_size; ++r) {
      for (int l = 0; l < num_local_[static_cast<std::size_t>(r)]; ++l) {
        int const place = first_[static_cast<std::size_t>(r)] + l;
        int const p = strategy_ == PlacementStrategy::linear ? place : r + l * ep_size;
        owner_[static_cast<std::size_t>(p)] = r;
        local_[static_cast<std::size_t>(p)] = l;
        by_place_[static_cast<std::size_t>(place)] = p;
      }
    }
    if (physical_to_logical_.empty()) {
      physical_to_logical_.resize(owner_.size());
      std::iota(physical_to_logical_.begin(), physical_to_logical_.end(), 0);
    }
  }

  PlacementStrategy strategy_;
  bool allow_empty_ranks_;
  int num_logical_;
  std::vector<std::int32_t> owner_;                // [P]
  std::vector<std::int32_t> local_;                // [P]
  std::vector<std::int32_t> physical_to_logical_;  // [P]
  std::vector<std::int32_t> num_local_;            // [R]
  std::vector<std::int32_t> first_;                // [R], exclusive prefix sum of num_local_
  std::vector<std::int32_t> by_place_;             // [P], physical ids owner by owner
};

/// The requested strategy, and the conditions for round_robin.
struct PlacementRequest {
  PlacementStrategy strategy = PlacementStrategy::linear;
  int num_expert_group = 1;            ///< groups of the router; 1: not grouped
  int num_redundant_experts = 0;       ///< X
  bool enable_eplb = false;            ///< load balancing owns the placement
  bool backend_translates_ids = true;  ///< the backend maps ids to (owner, local), or there is no all-to-all
  bool strict = false;                 ///< error instead of falling back
};

/// The strategy to use, and why it differs from the one asked for.
struct PlacementChoice {
  PlacementStrategy strategy;
  std::string reason;  ///< empty unless round_robin was asked for and linear is used
  bool warn;           ///< true for the first fallback of this process only: the caller logs `reason` once
};

/// round_robin needs grouped routing, no redundancy, no EPLB and a backend that translates ids; otherwise linear is chosen with a
/// reason, or, under strict, E_CONFIG.
inline PlacementChoice choose_placement(PlacementRequest const& request) {
  if (request.strategy == PlacementStrategy::linear) return {PlacementStrategy::linear, "", false};
  std::string reason;
  if (request.num_expert_group <= 1) reason = text("num_expert_group is ", request.num_expert_group, ", needs more than 1");
  if (request.num_redundant_experts != 0) reason = text("num_redundant_experts is ", request.num_redundant_experts, ", needs 0");
  if (request.enable_eplb) reason = "EPLB is on";
  if (!request.backend_translates_ids) reason = "the backend does not translate expert ids";
  if (reason.empty()) return {PlacementStrategy::round_robin, "", false};
  reason = text("round_robin expert placement does not apply: ", reason);
  if (request.strict) throw Error(ErrorCode::config, reason);
  static std::atomic<bool> warned{false};
  return {PlacementStrategy::linear, reason + "; linear is used", !warned.exchange(true)};
}

}  // namespace moe
