// SPDX-License-Identifier: Apache-2.0
// c/planning.hpp: moe_plan() over eplb::rebalance().
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "moe/c/status.hpp"
#include "moe/c/tensor.hpp"
#include "moe/eplb/rebalance.hpp"
#include "moe/moe.h"

namespace moe::c {

namespace detail {

template <class T>
void read_load(DLTensor const& load, eplb::Table<double>& out) {
  T const* const from = contiguous_data<T const>("load", load);
  std::copy_n(from, out.flat().size(), out.flat().begin());
}

/// [layers, cols] or, with depth > 0, [layers, cols, depth], int32.
inline std::int32_t* int_output(char const* what, DLTensor const& t, std::int64_t layers, std::int64_t cols, std::int64_t least_depth) {
  check_frame(what, t, least_depth > 0 ? 3 : 2, {});
  if (!same(t.dtype, dl_type<std::int32_t>())) refuse_dtype(what, t.dtype, dl_type<std::int32_t>());
  if (t.shape[0] != layers || t.shape[1] != cols || (least_depth > 0 && t.shape[2] < least_depth)) {
    refuse_shape(what, t, text("[", layers, ", ", cols, least_depth > 0 ? text(", ", least_depth, " or more]") : "]"));
  }
  return contiguous_data<std::int32_t>(what, t);
}

}  // namespace detail

inline void plan(moe_plan_config const& c, DLTensor const* load, DLTensor const* physical_to_logical, DLTensor const* logical_to_physical,
                 DLTensor const* replica_count) {
  DLTensor const& l = *not_null("load", load);
  detail::check_frame("load", l, 2, {});
  std::int64_t const layers = l.shape[0];
  std::int64_t const experts = l.shape[1];
  if (layers < 1 || experts < 1 || layers * experts > std::numeric_limits<std::int32_t>::max()) {
    detail::refuse_shape("load", l, "[layers, experts], both at least 1, at most 2^31 - 1 entries");
  }
  eplb::Table<double> table(static_cast<int>(layers), static_cast<int>(experts));
  if (same(l.dtype, dl_type<float>())) {
    detail::read_load<float>(l, table);
  } else if (same(l.dtype, dl_type<double>())) {
    detail::read_load<double>(l, table);
  } else if (same(l.dtype, dl_type<std::int32_t>())) {
    detail::read_load<std::int32_t>(l, table);
  } else if (same(l.dtype, dl_type<std::int64_t>())) {
    detail::read_load<std::int64_t>(l, table);
  } else {
    detail::refuse("load", text("dtype is ", describe(l.dtype)), "float32, float64, int32 or int64");
  }
  std::int32_t* const physical =
      detail::int_output("physical_to_logical", *not_null("physical_to_logical", physical_to_logical), layers, c.num_physical, 0);
  eplb::ExpertMaps const maps = eplb::rebalance(
      table, {.num_physical = c.num_physical, .num_groups = c.num_groups, .num_nodes = c.num_nodes, .num_ranks = c.num_ranks});
  std::int32_t const most = *std::max_element(maps.replica_count().flat().begin(), maps.replica_count().flat().end());
  std::int32_t* const logical =
      logical_to_physical == nullptr ? nullptr : detail::int_output("logical_to_physical", *logical_to_physical, layers, experts, most);
  std::int32_t* const counts = replica_count == nullptr ? nullptr : detail::int_output("replica_count", *replica_count, layers, experts, 0);

  std::ranges::copy(maps.physical_to_logical().flat(), physical);
  if (counts != nullptr) std::ranges::copy(maps.replica_count().flat(), counts);
  if (logical == nullptr) return;
  std::int64_t const depth = logical_to_physical->shape[2];
  std::fill_n(logical, layers * experts * depth, -1);
  for (int layer = 0; layer < maps.num_layers(); ++layer) {
    for (int e = 0; e < maps.num_logical(); ++e) {
      auto const slots = maps.replicas_of(layer, e).first(static_cast<std::size_t>(maps.replica_count()(layer, e)));
      std::ranges::copy(slots, logical + (layer * experts + e) * depth);
    }
  }
}

}  // namespace moe::c
