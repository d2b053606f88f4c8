// SPDX-License-Identifier: Apache-2.0
// tests/gpu/routing_test.cu: the routing kernel against the host: ids, weights, mapping, load and permutation, bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "moe/core/buffer.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/grouped_topk.hpp"
#include "moe/routing/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "moe/routing/zero_experts.hpp"

namespace {

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

/// One call and what to ask of it.
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
};

std::vector<float> logits_of(Case const& c) {
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

template <class L, class Router>
void expect_same(Router const& host_router, Router const& device_router, Case const& c, std::vector<std::int64_t> const& tokens = {}) {
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
  auto const device = routing::detail::routing_device();
  OnDevice<char> workspace(std::vector<char>(static_cast<std::size_t>(routing_workspace_bytes(tables.physical, device.num_sms)), 0));
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
  f.workspace = workspace.data();
  route_fused(device_router, f, nullptr);
  route_fused(device_router, f, nullptr);  // again: the barrier's word needs no reset
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
  EXPECT_EQ(d_sorted.get(), sorted);  // past the last row both leave what was there
}
void expect_same(Case const& c) {
  AnyRouter const router(c.config);
  expect_same<float>(router, router, c);
}

RouterConfig config(int e, int k, Scoring scoring, Renorm renorm = Renorm::sum) {
  RouterConfig c;
  c.num_experts = e;
  c.topk = k;
  c.scoring = scoring;
  c.renorm = renorm;
  return c;
}

TEST(RoutingKernel, SizesAndScores) {
  struct Shape {
    int e, k;
  };
  for (auto [e, k] : {Shape{1, 1}, Shape{8, 2}, Shape{32, 32}, Shape{60, 4}, Shape{128, 8}, Shape{256, 8}, Shape{384, 8}, Shape{896, 16},
                      Shape{1024, 32}}) {
    for (Scoring s : {Scoring::softmax, Scoring::sigmoid, Scoring::sqrtsoftplus, Scoring::identity}) {
      expect_same({.config = config(e, k, s), .rows = 37, .seed = static_cast<unsigned>(e)});
    }
    RouterConfig c = config(e, k, Scoring::softmax);
    c.order = Order::topk_then_score;
    expect_same({.config = c, .rows = 21, .edge_rows = true});
    expect_same({.config = config(e, k, Scoring::softmax, Renorm::none), .rows = 33, .edge_rows = true});
  }
}

TEST(RoutingKernel, R10_RowCounts) {
  for (std::int64_t rows : {0, 1, 15, 16, 17, 129, 700}) {
    expect_same({.config = config(64, 6, Scoring::softmax), .rows = rows});
    expect_same({.config = config(64, 6, Scoring::softmax), .rows = rows, .valid = rows / 3, .alignment = 8});
    expect_same({.config = config(64, 6, Scoring::softmax), .rows = rows, .valid = rows / 2, .valid_on_device = true});
    expect_same({.config = config(64, 6, Scoring::softmax), .rows = rows, .permute = false});
  }
  expect_same({.config = config(16, 2, Scoring::sigmoid), .rows = 300, .valid = 0, .valid_on_device = true});
}

TEST(RoutingKernel, ManyTilesABlockAndWideCounts) {
  expect_same({.config = config(64, 6, Scoring::softmax), .rows = 20000, .map = true, .alignment = 16});
  expect_same({.config = config(8, 2, Scoring::sigmoid), .rows = 66000, .valid = 65900});
}

TEST(RoutingKernel, GroupsInRegistersAndOutside) {
  std::mt19937 gen(7);
  std::normal_distribution<float> normal(0.0F, 0.3F);
  std::vector<float> bias(1024);
  for (float& b : bias) b = normal(gen) - 1.0F;  // mostly negative selection values
  OnDevice<float> d_bias(bias);
  struct Shape {
    int e, g, kept, k;
  };
  for (auto [e, g, kept, k] : {Shape{256, 8, 4, 8}, Shape{16, 4, 2, 4}, Shape{32, 4, 3, 4}, Shape{160, 8, 3, 6}, Shape{64, 32, 7, 6},
                               Shape{512, 64, 9, 10}, Shape{72, 8, 4, 8}, Shape{256, 1, 1, 8}, Shape{1024, 2, 1, 16}}) {
    for (GroupScore score : {GroupScore::max, GroupScore::top2_sum}) {
      for (bool biased : {false, true}) {
        Case c{.config = config(e, k, biased ? Scoring::sigmoid : Scoring::softmax), .rows = 70, .map = true, .edge_rows = true};
        c.config.num_expert_group = g;
        c.config.topk_group = kept;
        c.config.group_score = score;
        c.config.routed_scaling_factor = 2.5F;
        RouterConfig device = c.config;
        c.config.correction_bias = biased ? bias.data() : nullptr;
        device.correction_bias = biased ? d_bias.data() : nullptr;
        expect_same<float>(AnyRouter(c.config), AnyRouter(device), c);
      }
    }
  }
}

TEST(RoutingKernel, PolicyAgreesWithTheHost) {
  using Policy = GroupedTopK<Scoring::sigmoid, GroupScore::top2_sum, Renormalize::yes>;
  Policy const router({.num_experts = 256, .topk = 8, .num_expert_group = 8, .topk_group = 4, .routed_scaling_factor = 2.5F});
  for (std::int64_t rows : {128, 4096}) {
    expect_same<float>(router, router, {.config = router.resolved(), .rows = rows});
    expect_same<float>(router, router, {.config = router.resolved(), .rows = rows, .edge_rows = true});
  }
}

TEST(RoutingKernel, LogitTypes) {
  for (int e : {8, 64, 256, 260, 512}) {
    SoftmaxTopK<Renormalize::yes> const router({.num_experts = e, .topk = 4});
    expect_same<bf16>(router, router, {.config = router.resolved(), .rows = 90, .edge_rows = true});
    expect_same<f16>(router, router, {.config = router.resolved(), .rows = 90, .edge_rows = true});
  }
}

TEST(RoutingKernel, R8_BiasDisables) {
  std::vector<float> bias(40, 0.0F);
  for (std::size_t e = 0; e < 40; e += 1 + e % 2) bias[e] = -std::numeric_limits<float>::infinity();
  bias[39] = bias[20] = 0.0F;
  OnDevice<float> d_bias(bias);
  for (DegeneratePolicy policy : {DegeneratePolicy::uniform_first_k, DegeneratePolicy::drop}) {
    Case c{.config = config(40, 6, Scoring::softmax), .rows = 60, .edge_rows = true};
    c.config.degenerate = policy;
    RouterConfig device = c.config;
    c.config.correction_bias = bias.data();
    device.correction_bias = d_bias.data();
    expect_same<float>(AnyRouter(c.config), AnyRouter(device), c);
  }
}

TEST(RoutingKernel, R13_Sparsemixer) {
  for (float eps : {0.0F, 0.01F, 0.3F}) {
    Case c{.config = config(48, 2, Scoring::softmax, Renorm::none), .rows = 120, .edge_rows = true};
    c.config.selection = Selection::sparsemixer;
    c.config.sparsemixer_eps = eps;
    expect_same(c);
  }
}

TEST(RoutingKernel, HashTable) {
  std::vector<std::int64_t> table;
  std::vector<std::int64_t> tokens;
  for (std::int64_t i = 0; i < 50 * 4; ++i) table.push_back(i * 7 % 24 + (i % 61 == 0 ? 24 : 0) - (i % 53 == 0 ? 1 : 0));
  for (std::int64_t t = 0; t < 200; ++t) tokens.push_back(t * 13 % 53 - 1);  // some outside the vocabulary
  OnDevice<std::int64_t> d_table(table);
  Case c{.config = config(24, 4, Scoring::sqrtsoftplus), .rows = 200, .edge_rows = true};
  c.config.selection = Selection::hash_table;
  c.config.vocabulary = 50;
  RouterConfig device = c.config;
  c.config.hash_table = table.data();
  device.hash_table = d_table.data();
  expect_same<float>(AnyRouter(c.config), AnyRouter(device), c, tokens);
}

TEST(RoutingKernel, SharedZeroAndScaledExperts) {
  Case fused{.config = config(64, 6, Scoring::softmax), .rows = 150, .valid = 140, .map = true, .keep_every = 3, .alignment = 16};
  fused.config.num_fused_shared = 2;
  fused.config.fused_shared_weight = 0.4F;
  expect_same(fused);
  fused.local_shared = true;
  expect_same(fused);
  Case zero{.config = config(60, 6, Scoring::softmax, Renorm::none), .rows = 150, .map = true};
  zero.config.num_zero_experts = 30;
  expect_same(zero);
  Case joint{.config = config(24, 4, Scoring::sigmoid), .rows = 150, .edge_rows = true};
  joint.config.num_joint_shared = 3;
  expect_same(joint);
  Case capped{.config = config(24, 4, Scoring::sigmoid), .rows = 150, .edge_rows = true};
  capped.config.logit_softcap = 2.0F;
  expect_same(capped);
  for (Renorm renorm : {Renorm::floor, Renorm::p_norm}) {
    Case other{.config = config(24, 4, Scoring::softmax, renorm), .rows = 50};
    other.config.renorm_p = 2.0F;
    expect_same(other);
  }
  std::vector<float> scale(24);
  for (std::size_t e = 0; e < 24; ++e) scale[e] = 0.5F + 0.1F * static_cast<float>(e);
  OnDevice<float> d_scale(scale);
  Case scaled{.config = config(24, 4, Scoring::softmax), .rows = 50};
  RouterConfig device = scaled.config;
  scaled.config.per_expert_scale = scale.data();
  device.per_expert_scale = d_scale.data();
  expect_same<float>(AnyRouter(scaled.config), AnyRouter(device), scaled);
}

TEST(RoutingKernel, SelectOnTheDevice) {
  AnyRouter const router(config(64, 4, Scoring::softmax));
  Case const c{.config = router.config(), .rows = 100};
  auto const z = logits_of(c);
  std::vector<std::int32_t> ids(400);
  std::vector<float> weights(400);
  router.select(RouteArgs<float>{.logits = make_rows<dynamic, float const>(z.data(), 100, 64),
                                 .num_valid_rows = 90,
                                 .topk_ids = make_rows(ids.data(), 100, 4),
                                 .topk_weights = make_rows(weights.data(), 100, 4)});
  OnDevice<float> d_z(z), d_weights(std::vector<float>(400, 9.0F));
  OnDevice<std::int32_t> d_ids(std::vector<std::int32_t>(400, 9));
  router.select(RouteArgs<float>{.logits = make_rows<dynamic, float const>(d_z.data(), 100, 64),
                                 .num_valid_rows = 90,
                                 .topk_ids = make_rows(d_ids.data(), 100, 4),
                                 .topk_weights = make_rows(d_weights.data(), 100, 4)},
                nullptr);
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  EXPECT_EQ(d_ids.get(), ids);
  EXPECT_EQ(d_weights.get(), weights);
}

TEST(RoutingKernel, R19_GraphReplaysWithOtherLogitsAndRecordingOff) {
  int const rows = 512;
  AnyRouter const router(config(128, 8, Scoring::softmax));
  Case c{.config = router.config(), .rows = rows};
  OnDevice<float> logits(logits_of(c)), weights(std::vector<float>(rows * 8));
  OnDevice<std::int32_t> ids(std::vector<std::int32_t>(rows * 8)), load(std::vector<std::int32_t>(128, 0)), flag({1}), valid({rows});
  OnDevice<std::int32_t> sorted(std::vector<std::int32_t>(rows * 8)), inverse(std::vector<std::int32_t>(rows * 8));
  OnDevice<std::int64_t> offsets(std::vector<std::int64_t>(129));
  auto const device = routing::detail::routing_device();
  OnDevice<char> workspace(std::vector<char>(static_cast<std::size_t>(routing_workspace_bytes(128, device.num_sms)), 0));
  FusedRouting<float> f;
  f.args = {.logits = make_rows<dynamic, float const>(logits.data(), rows, 128),
            .num_valid_rows = rows,
            .topk_ids = make_rows(ids.data(), rows, 8),
            .topk_weights = make_rows(weights.data(), rows, 8)};
  f.num_valid_rows = valid.data();
  f.recorder = {.load_counter = load.data(), .record = flag.data()};
  f.permutation = {.num_local_experts = 128, .expert_offsets = offsets.data(), .sorted_slots = sorted.data(), .inverse = inverse.data()};
  f.workspace = workspace.data();
  CudaStream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  route_fused(router, f, stream);
  check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  std::size_t nodes = 0;
  check_cuda(cudaGraphGetNodes(graph, nullptr, &nodes), "cudaGraphGetNodes");
  EXPECT_EQ(nodes, 1U);  // one launch
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  std::vector<std::int32_t> want_load(128, 0);
  for (unsigned replay = 0; replay < 6; ++replay) {
    c.seed = 100 + replay;
    auto const z = logits_of(c);
    logits.buffer.copy_from_host(z.data());
    std::int32_t const record = replay % 2 == 0 ? 1 : 0;
    std::int32_t const now = rows - 50 * static_cast<std::int32_t>(replay);
    flag.buffer.copy_from_host(&record);
    valid.buffer.copy_from_host(&now);
    check_cuda(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    stream.synchronize();
    std::vector<std::int32_t> want(rows * 8);
    std::vector<float> want_weights(rows * 8);
    router.select(RouteArgs<float>{.logits = make_rows<dynamic, float const>(z.data(), rows, 128),
                                   .num_valid_rows = now,
                                   .topk_ids = make_rows(want.data(), rows, 8),
                                   .topk_weights = make_rows(want_weights.data(), rows, 8)});
    EXPECT_EQ(ids.get(), want);
    for (std::int32_t id : want) {
      if (id >= 0 && record != 0) ++want_load[static_cast<std::size_t>(id)];
    }
    EXPECT_EQ(load.get(), want_load);
    EXPECT_EQ(offsets.get()[128], now * 8);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

TEST(RoutingKernel, R22_ManyRowsOfManyExperts) {
  SoftmaxTopK<Renormalize::yes> const router({.num_experts = 512, .topk = 10});
  expect_same<bf16>(router, router, {.config = router.resolved(), .rows = 65536, .seed = 5});
}

TEST(RoutingKernel, Refusals) {
  AnyRouter const router(config(8, 2, Scoring::softmax));
  FusedRouting<float> f;
  float dummy = 0.0F;
  f.args.logits = make_rows<dynamic, float const>(&dummy, 4, 9);
  EXPECT_THROW(route_fused(router, f, nullptr), Error);
}

}  // namespace
