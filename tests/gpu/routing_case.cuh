// SPDX-License-Identifier: Apache-2.0
// tests/gpu/routing_case.cuh: one call of the routing kernel and the host's results for it, for the tests of routers and policies.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "moe/core/buffer.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/zero_experts.hpp"

namespace moe_test {

using namespace moe;
using namespace moe::routing;

template <class T>
struct OnDevice {
  Buffer<T, space::cuda> buffer;
  explicit OnDevice(std::vector<T> const& v) : buffer(static_cast<std::int64_t>(v.size())) {
    if (!v.empty()) buffer.copy_from_host(v.data());
  }
  T* data() { return buffer.data(); }
  std::vector<T> get() const {
    std::vector<T> v(static_cast<std::size_t>(buffer.size()));
    if (!v.empty()) buffer.copy_to_host(v.data());
    return v;
  }
};

/// One workspace for all calls of a test program, so that each call finds the leftovers of calls of other shapes.
inline void* routing_workspace(int num_physical) {
  constexpr int kMostPhysical = 2048;
  EXPECT_LE(num_physical, kMostPhysical);
  static OnDevice<char> workspace(
      std::vector<char>(static_cast<std::size_t>(routing_workspace_bytes(kMostPhysical, device_facts().num_sms)), 0));
  return workspace.data();
}

/// One call and its options.
struct Case {
  RouterConfig config;
  std::int64_t rows = 0;
  std::int64_t valid = -1;  ///< -1: all
  bool valid_on_device = false;
  bool map = false;  ///< every third expert has a second replica, some a third
  bool permute = true;
  int keep_every = 1;  ///< the expert_map keeps physical experts p with p % keep_every == 0
  int alignment = 1;
  bool local_shared = false;
  bool edge_rows = false;  ///< NaN, infinities, ties
  unsigned seed = 1;
  RoutingTuning const* tuning = nullptr;
};

inline std::vector<float> logits_of(Case const& c) {
  std::mt19937 gen(c.seed);
  std::normal_distribution<float> normal(0.0F, 2.0F);
  std::size_t const width = static_cast<std::size_t>(c.config.num_logits());
  std::vector<float> z(static_cast<std::size_t>(c.rows) * width);
  for (float& v : z) v = normal(gen);
  if (!c.edge_rows) return z;
  float const nan = std::numeric_limits<float>::quiet_NaN();
  float const inf = std::numeric_limits<float>::infinity();
  for (std::size_t t = 0; t < static_cast<std::size_t>(c.rows); ++t) {
    float* const row = z.data() + t * width;
    switch (t % 11) {
      case 0: std::fill_n(row, width, nan); break;
      case 1: std::fill_n(row, width, 0.5F); break;
      case 2: row[gen() % width] = nan; break;
      case 3: row[gen() % width] = inf; break;
      case 4:
        std::fill_n(row, width, -inf);
        row[gen() % width] = -3.0F;
        break;
      case 5:
        for (std::size_t e = 0; e < width; ++e) row[e] = e % 2 == 0 ? -0.0F : 0.0F;
        break;
      case 6:
        for (std::size_t e = 0; e < width; ++e) row[e] = std::round(row[e]);
        break;  // many ties
      case 7:
        for (std::size_t e = 0; e < width; ++e) row[e] *= 40.0F;
        break;  // saturated scores
      case 8: std::fill_n(row, width, -inf); break;
      default: break;
    }
  }
  return z;
}

/// The same tables on both sides.
struct Tables {
  std::vector<std::int32_t> l2p, count, map;
  int physical = 0;
  int locals = 0;
  explicit Tables(Case const& c) {
    int const e_count = c.config.num_experts;
    physical = e_count;
    for (int e = 0; e < e_count; ++e) {
      l2p.insert(l2p.end(), {e, -1, -1});
      count.push_back(1);
    }
    for (int e = 0; c.map && e < e_count; e += 3) {
      for (int r = 1; r <= 1 + e % 2; ++r) {
        l2p[static_cast<std::size_t>(3 * e + r)] = physical++;
        ++count[static_cast<std::size_t>(e)];
      }
    }
    for (int p = 0; p < physical; ++p) map.push_back(p % c.keep_every == 0 ? locals++ : -1);
  }
};

template <class L, class HostRouter, class Router>
void expect_same(HostRouter const& host_router, Router const& device_router, Case const& c, std::vector<std::int64_t> const& tokens = {}) {
  RouterConfig const& cfg = c.config;
  SCOPED_TRACE(testing::Message() << "E " << cfg.num_experts << " k " << cfg.topk << " rows " << c.rows << " valid " << c.valid << " seed "
                                  << c.seed);
  std::int64_t const m = c.rows;
  std::int64_t const valid = c.valid < 0 ? m : c.valid;
  int const k = cfg.topk;
  int const slots = cfg.num_slots();
  int const width = cfg.num_logits();
  auto const n = static_cast<std::size_t>(m * slots);
  Tables tables(c);
  int const shared = c.local_shared ? cfg.num_fused_shared : 0;
  auto const offsets_n = static_cast<std::size_t>(tables.locals + shared + 1);
  auto const capacity = static_cast<std::size_t>(permutation_rows(m, slots, tables.locals + shared, c.alignment));
  std::vector<L> logits;
  for (float v : logits_of(c)) logits.push_back(from_float<L>(v));

  // The host's answer.
  std::vector<std::int32_t> ids(n), logical(static_cast<std::size_t>(m * k)), load(static_cast<std::size_t>(tables.physical), 0);
  std::vector<float> weights(n), gammas(static_cast<std::size_t>(m * cfg.num_joint_shared)), zero(static_cast<std::size_t>(m), 0.0F);
  RouteCounters counters;
  host_router.select(RouteArgs<L>{.logits = make_rows<dynamic, L const>(logits.data(), m, width),
                                  .num_valid_rows = valid,
                                  .token_ids = tokens.empty() ? nullptr : tokens.data(),
                                  .topk_ids = make_rows(ids.data(), m, slots),
                                  .topk_weights = make_rows(weights.data(), m, slots),
                                  .counters = &counters,
                                  .shared_weights = make_rows(gammas.data(), m, cfg.num_joint_shared)});
  for (std::int64_t t = 0; t < m; ++t) {
    for (int j = 0; j < k; ++j) logical[static_cast<std::size_t>(t * k + j)] = ids[static_cast<std::size_t>(t * slots + j)];
    if (cfg.num_zero_experts > 0) {
      zero[static_cast<std::size_t>(t)] =
          take_zero_experts(cfg.num_experts, cfg.zero_expert_kind, k, ids.data() + t * slots, weights.data() + t * slots);
    }
  }
  ExpertMapping mapping{.num_experts = cfg.num_experts,
                        .num_physical = tables.physical,
                        .max_replicas = 3,
                        .logical_to_physical = tables.l2p.data(),
                        .replica_count = tables.count.data(),
                        .policy = ReplicaPolicy::token};
  map_experts(c.map ? &mapping : nullptr, {.load_counter = load.data()}, k, valid, make_rows(ids.data(), m, slots));
  std::vector<std::int64_t> offsets(offsets_n, -9);
  std::vector<std::int32_t> num_tokens(offsets_n - 1, -9), sorted(capacity, -9), inverse(n, -9);
  Permutation perm{.num_local_experts = tables.locals,
                   .num_local_shared = shared,
                   .expert_map = tables.map.data(),
                   .row_alignment = c.alignment,
                   .expert_offsets = offsets.data(),
                   .expert_num_tokens = num_tokens.data(),
                   .sorted_slots = sorted.data(),
                   .inverse = inverse.data()};
  permute_slots(make_rows<dynamic, std::int32_t const>(ids.data(), m, slots), k, tables.physical, valid, perm);

  // The device's answer, into poisoned memory.
  OnDevice<L> d_logits(logits);
  OnDevice<std::int64_t> d_tokens(tokens);
  OnDevice<std::int32_t> d_ids(std::vector<std::int32_t>(n, -77)), d_logical(std::vector<std::int32_t>(logical.size(), -77));
  OnDevice<float> d_weights(std::vector<float>(n, std::nanf(""))), d_gammas(std::vector<float>(gammas.size(), std::nanf("")));
  OnDevice<float> d_zero(std::vector<float>(zero.size(), std::nanf("")));
  OnDevice<RouteCounters> d_counters({RouteCounters{}});
  OnDevice<std::int32_t> d_valid({static_cast<std::int32_t>(valid)});
  OnDevice<std::int32_t> d_l2p(tables.l2p), d_count(tables.count), d_map(tables.map);
  OnDevice<std::int32_t> d_load(std::vector<std::int32_t>(load.size(), 0));
  OnDevice<std::int64_t> d_offsets(std::vector<std::int64_t>(offsets_n, -9));
  OnDevice<std::int32_t> d_num_tokens(std::vector<std::int32_t>(offsets_n - 1, -9)), d_sorted(std::vector<std::int32_t>(capacity, -9));
  OnDevice<std::int32_t> d_inverse(std::vector<std::int32_t>(n, -9));
  mapping.logical_to_physical = d_l2p.data();
  mapping.replica_count = d_count.data();
  FusedRouting<L> f;
  f.args = RouteArgs<L>{.logits = make_rows<dynamic, L const>(d_logits.data(), m, width),
                        .num_valid_rows = c.valid_on_device ? m : valid,
                        .token_ids = tokens.empty() ? nullptr : d_tokens.data(),
                        .topk_ids = make_rows(d_ids.data(), m, slots),
                        .topk_weights = make_rows(d_weights.data(), m, slots),
                        .counters = d_counters.data(),
                        .shared_weights = make_rows(d_gammas.data(), m, cfg.num_joint_shared)};
  f.num_valid_rows = c.valid_on_device ? d_valid.data() : nullptr;
  f.mapping = c.map ? &mapping : nullptr;
  f.recorder = {.load_counter = d_load.data()};
  f.logical_ids = d_logical.data();
  f.zero_expert_weights = d_zero.data();
  if (c.permute) {
    f.permutation = {.num_local_experts = tables.locals,
                     .num_local_shared = shared,
                     .expert_map = d_map.data(),
                     .row_alignment = c.alignment,
                     .expert_offsets = d_offsets.data(),
                     .expert_num_tokens = d_num_tokens.data(),
                     .sorted_slots = d_sorted.data(),
                     .inverse = d_inverse.data()};
  }
  f.workspace = routing_workspace(tables.physical);
  f.tuning = c.tuning;
  route_fused(device_router, f, nullptr);
  route_fused(device_router, f, nullptr);  // again, on the workspace as the first call left it
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");

  EXPECT_EQ(d_ids.get(), ids);
  EXPECT_EQ(d_logical.get(), logical);
  auto const got_weights = d_weights.get();
  for (std::size_t i = 0; i < n; ++i) ASSERT_NEAR(got_weights[i], weights[i], 1e-6F * std::max(1.0F, std::abs(weights[i]))) << i;
  auto const got_gammas = d_gammas.get();
  for (std::size_t i = 0; i < gammas.size(); ++i) ASSERT_NEAR(got_gammas[i], gammas[i], 1e-6F) << i;
  if (cfg.num_zero_experts > 0) {
    auto const got_zero = d_zero.get();
    for (std::size_t i = 0; i < zero.size(); ++i) ASSERT_NEAR(got_zero[i], zero[i], 1e-6F) << i;
  }
  EXPECT_EQ(d_counters.get()[0].degenerate_rows, 2 * counters.degenerate_rows);
  for (std::int32_t& v : load) v *= 2;
  EXPECT_EQ(d_load.get(), load);
  if (!c.permute) return;
  EXPECT_EQ(d_offsets.get(), offsets);
  EXPECT_EQ(d_num_tokens.get(), num_tokens);
  EXPECT_EQ(d_inverse.get(), inverse);
  EXPECT_EQ(d_sorted.get(), sorted);  // past the last row both leave the memory unchanged
}
inline RouterConfig config(int e, int k, Scoring scoring, Renorm renorm = Renorm::sum) {
  RouterConfig c;
  c.num_experts = e;
  c.topk = k;
  c.scoring = scoring;
  c.renorm = renorm;
  return c;
}

}  // namespace moe_test
