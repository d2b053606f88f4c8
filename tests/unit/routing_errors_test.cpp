// SPDX-License-Identifier: Apache-2.0
// tests/unit/routing_errors_test.cpp: the errors of routing, row by row of docs/semantics/routing.md §14, then every other error of its
// headers: code and text.
#undef NDEBUG  // an expert without a replica is an error in this file, for every build type
#include "moe/routing/capture.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "expect_error.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/capacity.hpp"
#include "moe/routing/custom.hpp"
#include "moe/routing/expert_mapping.hpp"
#include "moe/routing/permutation.hpp"
#include "moe/routing/route.hpp"
#include "moe/routing/routers.hpp"
#include "moe/routing/row/index_dtype.hpp"
#include "moe/routing/simulator.hpp"

namespace {

using namespace moe;
using namespace moe::routing;
using moe_test::expect_error;
using Ids = std::vector<std::int32_t>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
std::vector<float> const kZeros(64, 0.0F);
std::vector<std::int64_t> const kTable(64, 0);

/// A configuration that every router accepts, with one change.
template <class Change>
RouterConfig changed(Change&& change) {
  RouterConfig c{.num_experts = 16, .topk = 4};
  change(c);
  return c;
}
template <class Change>
void refused(ErrorCode code, std::string_view part, Change&& change) {
  expect_error(code, part, [&] { AnyRouter{changed(change)}; });
}

// ---- docs/semantics/routing.md §14, in its order.

TEST(RoutingErrorRows, Row1_TopK) {
  for (int k : {0, -1, 17}) refused(ErrorCode::config, text("top_k: ", k, " is out of range [1, 16]"), [=](auto& c) { c.topk = k; });
  refused(ErrorCode::config, "top_k: 20 is out of range [1, 19]", [](auto& c) {
    c.topk = 20;
    c.num_zero_experts = 3;
  });
  refused(ErrorCode::config, "top_k: 33 is out of range [1, 32]", [](auto& c) {
    c.num_experts = 64;
    c.topk = 33;
  });
}

TEST(RoutingErrorRows, Row2_R9_GroupedPreconditions) {
  auto const grouped = [](int groups, int kept, int k) {
    return [=](RouterConfig& c) {
      c.num_expert_group = groups;
      c.topk_group = kept;
      c.topk = k;
    };
  };
  refused(ErrorCode::config, "num_expert_group: -1 is below 0", grouped(-1, 1, 4));
  refused(ErrorCode::config, "num_expert_group: 5 does not divide num_experts 16", grouped(5, 1, 1));
  refused(ErrorCode::config, "num_expert_group: 32 does not divide num_experts 16", grouped(32, 1, 1));
  refused(ErrorCode::config, "topk_group: -1 is out of range [1, 4]", grouped(4, -1, 4));
  refused(ErrorCode::config, "topk_group: 5 is out of range [1, 4]", grouped(4, 5, 4));
  refused(ErrorCode::config, "topk_group: 2 groups of 4 experts hold less than top_k 9", grouped(4, 2, 9));
  refused(ErrorCode::config, "num_expert_group: 16 leaves groups of 1 expert, a group score of two needs at least 2", [&](auto& c) {
    grouped(16, 8, 4)(c);
    c.correction_bias = kZeros.data();
  });
}

TEST(RoutingErrorRows, Row3_GroupFieldsUnset) {
  refused(ErrorCode::config, "topk_group: 0 with num_expert_group 4: both must be set for grouped top-k",
          [](auto& c) { c.num_expert_group = 4; });
  refused(ErrorCode::config, "num_expert_group: 0 with topk_group 2: both must be set for grouped top-k",
          [](auto& c) { c.topk_group = 2; });
  using Grouped = GroupedTopK<Scoring::sigmoid, GroupScore::max, Renormalize::no>;
  expect_error(ErrorCode::config, "must be set for grouped top-k", [] { Grouped({.num_experts = 16, .topk = 4, .topk_group = 2}); });
}

/// Arrays of one call of a router of 16 experts and top 4, with one change.
template <class Change>
void call_refused(std::string_view part, Change&& change, RouterConfig const& config = changed([](auto&) {})) {
  std::vector<float> f(128);
  Ids ids(128);
  RouteArgs<float> a{.logits = make_rows<dynamic, float const>(f.data(), 3, config.num_logits()),
                     .num_valid_rows = 3,
                     .topk_ids = make_rows(ids.data(), 3, config.num_slots()),
                     .topk_weights = make_rows(f.data(), 3, config.num_slots())};
  change(a);
  expect_error(ErrorCode::argument, part, [&] { AnyRouter(config).select(a); });
}

TEST(RoutingErrorRows, Row4_Shapes) {
  call_refused("router_logits: shape [3, 15], expected [3, 16]",
               [](auto& a) { a.logits = make_rows<dynamic, float const>(kZeros.data(), 3, 15); });
  call_refused("topk_ids: shape [2, 4], expected [3, 4]", [](auto& a) { a.topk_ids = make_rows(a.topk_ids.data_handle(), 2, 4); });
  call_refused("topk_weights: shape [3, 5], expected [3, 4]",
               [](auto& a) { a.topk_weights = make_rows(a.topk_weights.data_handle(), 3, 5); });
  call_refused("num_valid_rows: 4 is out of range [0, 3]", [](auto& a) { a.num_valid_rows = 4; });
  call_refused("num_valid_rows: -1 is out of range [0, 3]", [](auto& a) { a.num_valid_rows = -1; });
  call_refused(
      "shared_weights: shape [3, 1], expected [3, 2]", [](auto& a) { a.shared_weights = make_rows(a.topk_weights.data_handle(), 3, 1); },
      changed([](auto& c) {
        c.scoring = Scoring::sigmoid;
        c.num_joint_shared = 2;
      }));
}

TEST(RoutingErrorRows, Row5_LogitsDtype) {
  for (DType t : {DType::f64, DType::e4m3, DType::i32, DType::u8}) {
    expect_error(ErrorCode::unsupported, text("router_logits: dtype ", name(t), " is none of f32, bf16, f16"),
                 [=] { check_logits_dtype(t); });
  }
  for (DType t : {DType::f32, DType::bf16, DType::f16}) EXPECT_NO_THROW(check_logits_dtype(t));
}

TEST(RoutingErrorRows, Row6_BiasWithTopKThenScore) {
  refused(ErrorCode::config, "correction_bias: needs score_then_topk, the order is topk_then_score", [](auto& c) {
    c.order = Order::topk_then_score;
    c.correction_bias = kZeros.data();
  });
  // Kolibri-1: with a score of one logit the bias chooses among the logits, and the weights are the unbiased scores.
  std::vector<float> const logits{0.0F, 2.0F, -1.0F, 1.0F}, bias{0.0F, -3.0F, 2.5F, 0.0F};
  AnyRouter const router(RouterConfig{
      .num_experts = 4, .topk = 2, .scoring = Scoring::sigmoid, .order = Order::topk_then_score, .correction_bias = bias.data()});
  Ids ids(2);
  std::vector<float> weights(2);
  router.select(RouteArgs<float>{.logits = make_rows(logits.data(), 1, 4),
                                 .num_valid_rows = 1,
                                 .topk_ids = make_rows(ids.data(), 1, 2),
                                 .topk_weights = make_rows(weights.data(), 1, 2)});
  EXPECT_EQ(ids, (Ids{2, 3}));
  EXPECT_FLOAT_EQ(weights[0], 0.26894143F);  // sigmoid(-1), sigmoid(1)
  EXPECT_FLOAT_EQ(weights[1], 0.73105860F);
}

TEST(RoutingErrorRows, Row7_ScoringName) {
  expect_error(ErrorCode::config, "scoring: 'relu' is none of softmax, sigmoid, sqrtsoftplus, identity", [] { parse_scoring("relu"); });
  for (Scoring s : {Scoring::softmax, Scoring::sigmoid, Scoring::sqrtsoftplus, Scoring::identity}) EXPECT_EQ(parse_scoring(name(s)), s);
}

TEST(RoutingErrorRows, Row8_WeightOnInput) {
  expect_error(ErrorCode::config, "topk must be 1 where the router weight is applied on the input, it is 2",
               [] { Llama4({.num_experts = 8, .topk = 2}); });
}

TEST(RoutingErrorRows, Row9_HashRouterWithoutTokenIds) {
  RouterConfig const hash = changed([](auto& c) {
    c.selection = Selection::hash_table;
    c.hash_table = kTable.data();
    c.vocabulary = 16;
  });
  call_refused("token_ids: null, hash routing needs token ids", [](auto&) {}, hash);
}

TEST(RoutingErrorRows, Row10_FusedSharedExpertsUnderEplbWithoutReplicaCount) {
  RouterConfig const c = changed([](auto& with) { with.num_fused_shared = 2; });
  Ids ids(6), table(16, 0);
  std::vector<float> weights(6), logits(16);
  ExpertMapping const mapping{.num_experts = 16, .num_physical = 16, .max_replicas = 1, .logical_to_physical = table.data()};
  FusedRouting<float> call{.args = {.logits = make_rows<dynamic, float const>(logits.data(), 1, 16),
                                    .num_valid_rows = 1,
                                    .topk_ids = make_rows(ids.data(), 1, 6),
                                    .topk_weights = make_rows(weights.data(), 1, 6)},
                           .mapping = &mapping};
  expect_error(ErrorCode::state, "EPLB enabled but replica_count is not set", [&] { check_fused(c, call); });
}

// ---- Other rules of the router's configuration.

TEST(RoutingErrors, Configurations) {
  auto const e_config = ErrorCode::config;
  refused(e_config, "num_experts: 0 is below 1", [](auto& c) { c.num_experts = 0; });
  refused(e_config, "num_experts: 1025 logits per token, at most 1024", [](auto& c) {
    c.num_experts = 1020;
    c.num_zero_experts = 5;
  });
  refused(e_config, "num_zero_experts: -1 is below 0", [](auto& c) { c.num_zero_experts = -1; });
  refused(e_config, "num_fused_shared: -1 is out of range [0, 32]", [](auto& c) { c.num_fused_shared = -1; });
  refused(e_config, "num_fused_shared: 33 is out of range [0, 32]", [](auto& c) { c.num_fused_shared = 33; });
  refused(e_config, "num_joint_shared: -1 is out of range [0, 32]", [](auto& c) { c.num_joint_shared = -1; });
  refused(e_config, "num_joint_shared: 1 needs a score of one logit, the scoring is softmax", [](auto& c) { c.num_joint_shared = 1; });
  refused(e_config, "num_fused_shared: 1 with num_zero_experts 2: both number their ids from num_experts", [](auto& c) {
    c.num_fused_shared = 1;
    c.num_zero_experts = 2;
  });
  refused(e_config, "num_expert_group: 4 with num_zero_experts 2: zero experts belong to no group", [](auto& c) {
    c.num_expert_group = 4;
    c.topk_group = 2;
    c.num_zero_experts = 2;
  });
  refused(e_config, "logit_softcap: -1 is below 0", [](auto& c) { c.logit_softcap = -1.0F; });
  refused(e_config, "logit_softcap: nan is not a finite number", [](auto& c) { c.logit_softcap = kNan; });
  refused(e_config, "logit_softcap: inf is not a finite number", [](auto& c) { c.logit_softcap = kInfinity; });
  refused(e_config, "renorm_eps: -1 is below 0", [](auto& c) { c.renorm_eps = -1.0F; });
  refused(e_config, "renorm_eps: nan is not a finite number", [](auto& c) { c.renorm_eps = kNan; });
  refused(e_config, "renorm_p: inf is not a finite number", [](auto& c) { c.renorm_p = kInfinity; });
  refused(e_config, "routed_scaling_factor: nan is not a finite number", [](auto& c) { c.routed_scaling_factor = kNan; });
  refused(e_config, "fused_shared_weight: -inf is not a finite number", [](auto& c) { c.fused_shared_weight = -kInfinity; });
  refused(e_config, "renorm_p: 0 is not above 0", [](auto& c) {
    c.renorm = Renorm::p_norm;
    c.renorm_p = 0.0F;
  });
}

TEST(RoutingErrors, R13_Sparsemixer) {
  auto const mixer = [](auto&& change) {
    return [=](RouterConfig& c) {
      c.selection = Selection::sparsemixer;
      c.topk = 2;
      change(c);
    };
  };
  refused(ErrorCode::argument, "top_k: 3, sparsemixer needs 2", mixer([](auto& c) { c.topk = 3; }));
  refused(ErrorCode::argument, "renormalize: true, sparsemixer needs false", mixer([](auto& c) { c.renorm = Renorm::sum; }));
  refused(ErrorCode::config, "selection: sparsemixer takes softmax without bias, groups or zero experts",
          mixer([](auto& c) { c.correction_bias = kZeros.data(); }));
  refused(ErrorCode::config, "sparsemixer_eps (router_jitter_noise): -0.5 is below 0", mixer([](auto& c) { c.sparsemixer_eps = -0.5F; }));
}

TEST(RoutingErrors, HashTable) {
  auto const hash = [](auto&& change) {
    return [=](RouterConfig& c) {
      c.selection = Selection::hash_table;
      c.hash_table = kTable.data();
      c.vocabulary = 16;
      change(c);
    };
  };
  refused(ErrorCode::argument, "hash_table: null, hash routing needs a table", hash([](auto& c) { c.hash_table = nullptr; }));
  refused(ErrorCode::config, "vocabulary: 0 is below 1", hash([](auto& c) { c.vocabulary = 0; }));
  refused(ErrorCode::config, "num_expert_group: 4 with a hash table, which chooses from all experts", hash([](auto& c) {
            c.num_expert_group = 4;
            c.topk_group = 2;
          }));
}

TEST(RoutingErrors, BiasLength) {
  expect_error(ErrorCode::argument, "correction_bias: length 15, expected 16", [] { check_bias_length(15, 16); });
  expect_error(ErrorCode::argument, "correction_bias: length 16, expected 18", [] { check_bias_length(16, 16, 2); });
  EXPECT_NO_THROW(check_bias_length(18, 16, 2));
}

// ---- Mapping and the fused call.

struct Mapped {
  Ids l2p{0, -1, 1, -1}, count{1, 1};
  ExpertMapping mapping{
      .num_experts = 2, .num_physical = 3, .max_replicas = 2, .logical_to_physical = l2p.data(), .replica_count = count.data()};
  template <class Change>
  void refused(ErrorCode code, std::string_view part, Change&& change) {
    ExpertMapping m = mapping;
    change(m);
    expect_error(code, part, [&] { validate(m); });
  }
};

TEST(RoutingErrors, Mapping) {
  Mapped x;
  EXPECT_NO_THROW(validate(x.mapping));
  auto const e_config = ErrorCode::config;
  x.refused(ErrorCode::state, "EPLB enabled but logical_to_physical is not set", [](auto& m) { m.logical_to_physical = nullptr; });
  x.refused(ErrorCode::state, "EPLB enabled but replica_count is not set", [](auto& m) { m.replica_count = nullptr; });
  LoadRecorder const no_counter;
  expect_error(ErrorCode::state, "EPLB enabled but load counter is not set", [&] { validate(x.mapping, &no_counter); });
  x.refused(e_config, "num_experts: 0 is below 1", [](auto& m) { m.num_experts = 0; });
  x.refused(e_config, "num_physical: 1 is below num_experts 2", [](auto& m) { m.num_physical = 1; });
  x.refused(e_config, "max_replicas: 0 is below 1", [](auto& m) { m.max_replicas = 0; });
  x.refused(e_config, "ep_size: 0 is below 1", [](auto& m) { m.ep_size = 0; });
  x.refused(e_config, "ranks_per_node: 0 is below 1", [](auto& m) { m.ranks_per_node = 0; });
  x.refused(e_config, "source_rank: 1 is out of range [0, 1)", [](auto& m) { m.source_rank = 1; });
  x.refused(e_config, "num_physical: 3 is not divisible by ep_size 2 and physical_to_rank is not set", [](auto& m) { m.ep_size = 2; });
}

TEST(RoutingErrors, ExpertWithoutAReplicaIsInternalInDebugBuilds) {
  Mapped x;
  x.count[1] = 0;
  Ids ids{0, 1};
  expect_error(ErrorCode::internal, "replica_count: expert 1 has 0 replicas, at least 1",
               [&] { map_experts(&x.mapping, {}, 1, 2, make_rows(ids.data(), 2, 1)); });
  EXPECT_EQ(map_expert(x.mapping, 1, 0, 0, 1), kNoExpert) << "what release builds and devices do";
}

TEST(RoutingErrors, FusedCall) {
  RouterConfig c = changed([](auto& with) { with.num_experts = 2, with.topk = 1; });
  Mapped x;
  Ids ids(4);
  std::vector<float> weights(4), logits(16);
  FusedRouting<float> call{.args = {.logits = make_rows<dynamic, float const>(logits.data(), 1, 2),
                                    .num_valid_rows = 1,
                                    .topk_ids = make_rows(ids.data(), 1, 1),
                                    .topk_weights = make_rows(weights.data(), 1, 1)},
                           .mapping = &x.mapping};
  EXPECT_NO_THROW(check_fused(c, call));
  std::vector<std::int64_t> offsets(4);
  call.permutation = {.num_local_experts = 3, .expert_offsets = offsets.data(), .sorted_slots = ids.data(), .inverse = ids.data()};
  expect_error(ErrorCode::argument, "workspace: null, a permutation needs routing_workspace_bytes()", [&] { check_fused(c, call); });
  call.permutation = {};
  x.mapping.num_experts = 1;
  expect_error(ErrorCode::argument, "mapping: of 1 experts, the router chooses among 2", [&] { check_fused(c, call); });
  x.mapping.num_experts = 2;
  c.num_zero_experts = 1;
  call.args.logits = make_rows<dynamic, float const>(logits.data(), 1, 3);
  expect_error(ErrorCode::argument, "zero_expert_weights: null, zero experts leave the slots before mapping",
               [&] { check_fused(c, call); });
}

TEST(RoutingErrors, Permutation) {
  std::vector<std::int64_t> offsets(5);
  Ids slots(8), map(4, 0);
  Permutation const good{.num_local_experts = 4, .expert_offsets = offsets.data(), .sorted_slots = slots.data(), .inverse = slots.data()};
  auto const refuse = [&](ErrorCode code, std::string_view part, auto&& change, std::int64_t rows = 2) {
    Permutation p = good;
    change(p);
    expect_error(code, part, [&] { validate(p, rows, 2, 4, 1); });
  };
  EXPECT_NO_THROW(validate(good, 2, 2, 4, 1));
  refuse(ErrorCode::argument, "num_local_experts: 0 is below 1", [](auto& p) { p.num_local_experts = 0; });
  refuse(ErrorCode::argument, "num_local_experts: 3 of 4 physical experts needs an expert_map", [](auto& p) { p.num_local_experts = 3; });
  refuse(ErrorCode::argument, "num_local_shared: 2 is neither 0 nor num_fused_shared 1", [](auto& p) { p.num_local_shared = 2; });
  refuse(ErrorCode::argument, "row_alignment: 0 is below 1", [](auto& p) { p.row_alignment = 0; });
  refuse(ErrorCode::argument, "sorted_slots and inverse: must be set with expert_offsets", [](auto& p) { p.inverse = nullptr; });
  refuse(ErrorCode::capacity, "sorted_slots: 2147483648 rows, at most 2^31 - 1", [](auto&) {}, std::int64_t{1} << 30);
}

// ---- Routers beside the table: simulator, capacity, recorder, ids for a transport.

template <class Change>
void simulation_refused(ErrorCode code, std::string_view part, Change&& change) {
  SimulatorParams p{.num_experts = 30, .topk = 4, .rank = 2, .num_ranks = 4};
  change(p);
  expect_error(code, part, [&] { Simulator{p}; });
}

TEST(RoutingErrors, R20_Simulator) {
  auto const e_config = ErrorCode::config;
  simulation_refused(ErrorCode::argument, "routing strategy 'fancy' is unknown; valid: balanced, empty_rank,",
                     [](auto& p) { p.strategy = "fancy"; });
  expect_error(ErrorCode::argument, "routing strategy 'zipf' is already registered",
               [] { SimulatorRegistry::instance().add("zipf", nullptr); });
  simulation_refused(e_config, "num_experts: 0 is out of range [1, 1024]", [](auto& p) { p.num_experts = 0; });
  simulation_refused(e_config, "top_k: 31 is out of range [1, 30]", [](auto& p) { p.topk = 31; });
  simulation_refused(e_config, "num_ranks: 31 is out of range [1, 30]", [](auto& p) { p.num_ranks = 31; });
  simulation_refused(e_config, "rank: 4 is out of range [0, 4)", [](auto& p) { p.rank = 4; });
  simulation_refused(e_config, "hot_expert: 30 is out of range [0, 30)", [](auto& p) { p.hot_expert = 30; });
  simulation_refused(e_config, "hot_fraction: 1.5 is out of range [0, 1]", [](auto& p) { p.hot_fraction = 1.5; });
  simulation_refused(e_config, "hot_fraction: nan", [](auto& p) { p.hot_fraction = std::nan(""); });
  simulation_refused(e_config, "mean: nan is not finite", [](auto& p) { p.mean = std::nan(""); });
  simulation_refused(e_config, "deviation: inf is not finite", [](auto& p) { p.deviation = kInfinity; });
  simulation_refused(e_config, "zipf_exponent: nan is not finite", [](auto& p) { p.zipf_exponent = std::nan(""); });
  simulation_refused(e_config, "top_k: 8 distinct experts on rank 2, which owns 7", [](auto& p) {
    p.strategy = "one_rank";
    p.topk = 8;
  });
  simulation_refused(e_config, "top_k: 24 distinct experts off rank 2, there are 23", [](auto& p) {
    p.strategy = "empty_rank";
    p.topk = 24;
  });
  RoutingRecord const record{2, {4, 5, 6, 7}, {.1F, .9F, .2F, .8F}};
  auto const replay = [&](SimulatorParams& p) {
    p.strategy = "replay";
    p.topk = 2;
    p.record = &record;
  };
  simulation_refused(ErrorCode::argument, "record: null, replay needs one", [&](auto& p) {
    replay(p);
    p.record = nullptr;
  });
  simulation_refused(ErrorCode::argument, "top_k: 3, the record has 2", [&](auto& p) {
    replay(p);
    p.topk = 3;
  });
  simulation_refused(ErrorCode::argument, "record: id 7 is out of range [-1, 7)", [&](auto& p) {
    replay(p);
    p.num_experts = 7;
  });
  SimulatorParams p{.num_experts = 30, .topk = 2};
  replay(p);
  std::vector<float> logits(90), weights(6);
  Ids ids(6);
  RouteArgs<float> const three{.logits = make_rows<dynamic, float const>(logits.data(), 3, 30),
                               .num_valid_rows = 3,
                               .topk_ids = make_rows(ids.data(), 3, 2),
                               .topk_weights = make_rows(weights.data(), 3, 2)};
  expect_error(ErrorCode::argument, "record: row 2 is out of range [0, 2)", [&] { Simulator(p).select(three); });
  p.first_row = -1;
  expect_error(ErrorCode::argument, "first_row: -1 is below 0", [&] { Simulator(p).select(three); });
}

TEST(RoutingErrors, Capacity) {
  auto const refuse = [](std::string_view part, double factor, auto&& change) {
    expect_error(ErrorCode::config, part, [&] { CapacityTopK({changed(change), factor}); });
  };
  refuse("capacity_factor: 0 is not above 0", 0.0, [](auto&) {});
  refuse("capacity_factor: nan is not above 0", std::nan(""), [](auto&) {});
  refuse("capacity_factor: needs score_then_topk", 1.0, [](auto& c) { c.order = Order::topk_then_score; });
  refuse("top_k: 17 is out of range", 1.0, [](auto& c) { c.topk = 17; });
  EXPECT_EQ(expert_capacity(kInfinity, 10, 3, 7), 30) << "no expert gets more than all slots";
  EXPECT_EQ(expert_capacity(1e300, 10, 3, 7), 30);
}

// R6 for capacity routing: a row whose experts are all disabled by logits or bias is degenerate; a row that only finds no capacity is not.
TEST(RoutingErrors, R6_CapacityCountsRowsWithoutAnEnabledExpert) {
  std::vector<float> const bias(2, -kInfinity);
  std::vector<float> const logits{1, 0, 1, 0, -kInfinity, -kInfinity};
  auto const rows_degenerate = [&](bool biased) {
    CapacityTopK const router({changed([&](auto& c) {
                                 c.num_experts = 2;
                                 c.topk = 2;
                                 c.degenerate = DegeneratePolicy::drop;
                                 if (biased) c.correction_bias = bias.data();
                               }),
                               0.1});
    Ids ids(6);
    std::vector<float> weights(6);
    RouteCounters counters;
    router.select(RouteArgs<float>{.logits = make_rows<dynamic, float const>(logits.data(), 3, 2),
                                   .num_valid_rows = 3,
                                   .topk_ids = make_rows(ids.data(), 3, 2),
                                   .topk_weights = make_rows(weights.data(), 3, 2),
                                   .counters = &counters});
    EXPECT_EQ(ids[2], kNoExpert) << "one place an expert, which the first row took";
    return counters.degenerate_rows;
  };
  EXPECT_EQ(rows_degenerate(false), 1);
  EXPECT_EQ(rows_degenerate(true), 3);
}

TEST(RoutingErrors, Recorder) {
  RoutingRecorder recorder(1);
  Ids const ids{0, 1};
  std::vector<float> const w{.5F, .5F};
  recorder.add(0, make_rows(ids.data(), 1, 2), make_rows(w.data(), 1, 2), 1);
  expect_error(ErrorCode::argument, "top_k: 1, the record of layer 0 has 2",
               [&] { recorder.add(0, make_rows(ids.data(), 2, 1), make_rows(w.data(), 2, 1), 2); });
  expect_error(ErrorCode::argument, "layer: -1 is out of range [0, 1)",
               [&] { recorder.add(-1, make_rows(ids.data(), 1, 2), make_rows(w.data(), 1, 2), 1); });
  expect_error(ErrorCode::argument, "routing record: cannot write", [&] { recorder.write("/proc/routing_record.bin"); });
}

TEST(RoutingErrors, R24_UnsignedIds) {
  Ids const ids{3, -1};
  std::vector<std::uint32_t> out(2, 9);
  expect_error(ErrorCode::unsupported, "negative id in uint32: topk_ids[0, 1] = -1",
               [&] { convert_ids<std::uint32_t>(make_rows(ids.data(), 1, 2), make_rows(out.data(), 1, 2)); });
  EXPECT_EQ(out, std::vector<std::uint32_t>(2, 9)) << "nothing is written";
}

}  // namespace
