// SPDX-License-Identifier: Apache-2.0
// routing/capacity.hpp: balanced routing: no expert takes more than its share of a call's slots; the rest moves to the next best expert.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

#include "moe/core/error.hpp"
#include "moe/routing/row/route_args.hpp"
#include "moe/routing/row/route_row.hpp"
#include "moe/routing/row/validate.hpp"

namespace moe::routing {

/// Slots that one expert accepts: ceil(capacity_factor M k / E), in double precision, at most M k. M: valid rows of the call.
inline std::int64_t expert_capacity(double capacity_factor, std::int64_t num_rows, int topk, int num_experts) {
  double const slots = static_cast<double>(num_rows) * topk;
  return static_cast<std::int64_t>(std::min(std::ceil(capacity_factor * slots / num_experts), slots));
}

namespace detail {
/// Score of a group with full experts: that of the experts left; with one left, its own score; with none, -inf. room: free slots by expert.
struct GroupScoreOfRoom {
  GroupScore kind;
  std::int64_t const* room;
};
MOE_HD inline float group_score(GroupScoreOfRoom of, float const* sel, int first, int size) {
  float const score = group_score(of.kind, sel, first, size);
  bool full = false;
  for (int e = first; e < first + size; ++e) full = full || of.room[e] <= 0;
  return full && score == -kInfinity ? group_score(GroupScore::max, sel, first, size) : score;
}
/// What route_row() reads for a row of balanced top-k.
struct CapacityRow : RouterConfig {
  GroupScoreOfRoom group_score{};
};
}  // namespace detail

/// Balanced top-k (docs/semantics/routing.md §12), on the host. It changes results and depends on the batch, so it is never a default.
class CapacityTopK {
 public:
  static constexpr char const* kName = "capacity_topk";
  static constexpr bool kWeightOnInput = false;
  struct Params {
    RouterConfig config;           ///< a top-k selection, scored before the choice
    double capacity_factor = 1.0;  ///< above 0
  };
  /// Throws E_CONFIG.
  explicit CapacityTopK(Params const& p) : p_(p) {
    validate(p.config);
    detail::require(p.capacity_factor > 0.0, ErrorCode::config, "capacity_factor: ", p.capacity_factor, " is not above 0");
    detail::require(p.config.selection == Selection::topk && p.config.order == Order::score_then_topk && p.config.num_joint_shared == 0,
                    ErrorCode::config, "capacity_factor: needs score_then_topk without joint shared experts");
  }

  int num_experts() const { return p_.config.num_experts; }
  int topk() const { return p_.config.topk; }
  int num_logits() const { return p_.config.num_logits(); }
  int num_slots() const { return p_.config.num_slots(); }

  /// Rows in ascending order, then columns: a slot takes the row's best remaining expert that has room and is in a kept group, or id -1 if
  /// there is none. Weights are the scores of the experts taken, renormalised if configured. A full expert does not count for its group,
  /// whose score is that of the best one or two left; zero experts are never full. The table of free slots is on the stack.
  template <class L>
  void select(RouteArgs<L> const& a) const {
    RouterConfig const& c = p_.config;
    check_args(c, a);
    check_logits(a);
    int const n = c.num_experts + c.num_zero_experts;
    std::int64_t const capacity = expert_capacity(p_.capacity_factor, a.num_valid_rows, c.topk, c.num_experts);
    std::array<std::int64_t, kMaxLogits> room;  // of the first n: validate() has seen that there are no more
    std::fill_n(room.begin(), c.num_experts, capacity);
    std::fill_n(room.begin() + c.num_experts, c.num_zero_experts, a.logits.extent(0) * c.topk);
    std::array<float, kMaxLogits> masked;
    for (std::int64_t t = 0; t < a.logits.extent(0); ++t) {
      std::int32_t* const ids = row_ptr(a.topk_ids, t);
      float* const weights = row_ptr(a.topk_weights, t);
      if (t >= a.num_valid_rows) {
        pad_row(c, ids, weights);
        continue;
      }
      // A full expert gets a bias of -inf: it is scored like any other and not chosen.
      for (int e = 0; e < n; ++e) {
        float const bias = c.correction_bias == nullptr ? 0.0F : c.correction_bias[e];
        masked[static_cast<std::size_t>(e)] = room[static_cast<std::size_t>(e)] > 0 ? bias : -detail::kInfinity;
      }
      detail::CapacityRow row{c, {c.group_score, room.data()}};
      row.correction_bias = masked.data();
      bool disabled = true;
      for (int e = 0; e < n; ++e) {
        bool const by_bias = c.correction_bias != nullptr && !(c.correction_bias[e] > -detail::kInfinity);
        disabled = disabled && (by_bias || !(to_float(a.logits(t, e)) > -detail::kInfinity));
      }
      if (!disabled) row.degenerate = DegeneratePolicy::drop;  // all experts are full; the row itself is not degenerate
      route_row(row, row_ptr(a.logits, t), 0, ids, weights);
      if (disabled && a.counters != nullptr) ++a.counters->degenerate_rows;
      for (int j = 0; j < c.topk; ++j) {
        if (ids[j] != kNoExpert) --room[static_cast<std::size_t>(ids[j])];
      }
    }
  }

 private:
  Params p_;
};

}  // namespace moe::routing
