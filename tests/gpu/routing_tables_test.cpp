// SPDX-License-Identifier: Apache-2.0
// tests/gpu/routing_tables_test.cpp: the routing tables and the routing of every model family's own code, through the device's kernel.
#include "routing_tables.hpp"

#include "routing_golden.hpp"

/// Narrow logits are widened here: tests/gpu/routing_test.cu tests the logit types of the kernel.
template <class Config, class L>
moe_test::RoutedRow moe_test::route_one(Config const& cfg, std::vector<L> const& logits, std::int64_t token) {
  auto const slots = static_cast<std::size_t>(cfg.num_slots());
  RoutedRow r{std::vector<std::int32_t>(slots, -7), std::vector<float>(slots, -7.0F),
              std::vector<float>(static_cast<std::size_t>(cfg.num_joint_shared), -7.0F)};
  std::vector<float> wide;
  for (L v : logits) wide.push_back(to_float(v));
  RouteCounters counters;
  select_batch(resolve(cfg), RouteArgs<float>{.logits = make_rows(static_cast<float const*>(wide.data()), 1, cfg.num_logits()),
                                              .num_valid_rows = 1,
                                              .token_ids = &token,
                                              .topk_ids = make_rows(r.ids.data(), 1, cfg.num_slots()),
                                              .topk_weights = make_rows(r.weights.data(), 1, cfg.num_slots()),
                                              .counters = &counters,
                                              .shared_weights = make_rows(r.shared.data(), 1, cfg.num_joint_shared)});
  r.degenerate = counters.degenerate_rows > 0;
  r.num_chosen = static_cast<int>(std::count_if(r.ids.begin(), r.ids.end(), [](std::int32_t id) { return id >= 0; }));
  return r;
}
