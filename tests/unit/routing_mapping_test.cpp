// SPDX-License-Identifier: Apache-2.0
// tests/unit/routing_mapping_test.cpp: logical to physical experts, load recording, zero experts, capacity, id types, custom functions.
#include "moe/routing/capacity.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "expect_error.hpp"
#include "moe/routing/capture.hpp"
#include "moe/routing/custom.hpp"
#include "moe/routing/expert_mapping.hpp"
#include "moe/routing/row/index_dtype.hpp"
#include "moe/routing/zero_experts.hpp"

namespace {

using namespace moe;
using namespace moe::routing;
using moe_test::expect_error;
using Ids = std::vector<std::int32_t>;

/// The example of docs/semantics/routing.md §9: physical to logical = [3,1,0,0,0,2].
struct Example {
  Ids p2l{3, 1, 0, 0, 0, 2};
  Ids l2p{2, 4, 3, 1, -1, -1, 5, -1, -1, 0, -1, -1};
  Ids count{3, 1, 1, 1};
  ExpertMapping mapping{.num_experts = 4,
                        .num_physical = 6,
                        .max_replicas = 3,
                        .logical_to_physical = l2p.data(),
                        .replica_count = count.data(),
                        .policy = ReplicaPolicy::position};
  Ids map(Ids ids, int k, std::int64_t valid = -1, LoadRecorder recorder = {}) {
    auto const rows = static_cast<std::int64_t>(ids.size()) / k;
    map_experts(&mapping, recorder, k, valid < 0 ? rows : valid, make_rows(ids.data(), rows, k));
    return ids;
  }
};

TEST(ExpertMapping, R14_ExampleWithCounts) {
  Example x;
  Ids load(6, 0);
  EXPECT_EQ(x.map({0, 1, 0, 2, 3, 0}, 2, -1, {.load_counter = load.data()}), (Ids{2, 1, 3, 5, 0, 3}));
  EXPECT_EQ(load, (Ids{1, 1, 1, 2, 0, 1}));
  x.mapping.policy = ReplicaPolicy::token;
  EXPECT_EQ(x.map({0, 1, 0, 2, 3, 0}, 2), (Ids{2, 1, 4, 5, 0, 3}));
  Ids const mapped = x.map({0, 1, 0, 2, 3, 0}, 2);
  Ids const logical{0, 1, 0, 2, 3, 0};
  for (std::size_t i = 0; i < mapped.size(); ++i) EXPECT_EQ(x.p2l[static_cast<std::size_t>(mapped[i])], logical[i]);
}

TEST(ExpertMapping, R15_ReplicasOfAnExpertThatIsAlwaysFirst) {
  Ids l2p(9 * 2, -1);
  for (int e = 0; e < 9; ++e) l2p[2 * static_cast<std::size_t>(e)] = e;
  l2p[1] = 9;
  Ids count(9, 1);
  count[0] = 2;
  ExpertMapping m{.num_experts = 9,
                  .num_physical = 10,
                  .max_replicas = 2,
                  .logical_to_physical = l2p.data(),
                  .replica_count = count.data(),
                  .policy = ReplicaPolicy::position};
  Ids ids(8000);
  auto const run = [&] {
    for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i % 8);
    Ids load(10, 0);
    map_experts(&m, {.load_counter = load.data()}, 8, 1000, make_rows(ids.data(), 1000, 8));
    EXPECT_EQ(std::accumulate(load.begin(), load.end(), 0), 8000);
    return std::pair{load[0], load[9]};
  };
  EXPECT_EQ(run(), std::pair(1000, 0));
  m.policy = ReplicaPolicy::token;
  EXPECT_EQ(run(), std::pair(500, 500));
}

TEST(ExpertMapping, R16_IdsOutOfRangeCountAsNoExpert) {
  Example x;
  Ids load(6, 0);
  EXPECT_EQ(x.map({-1, 4, 100, 1}, 2, -1, {.load_counter = load.data()}), (Ids{-1, -1, -1, 1}));
  EXPECT_EQ(std::accumulate(load.begin(), load.end(), 0), 1);
}

TEST(ExpertMapping, R10_PaddingIsNotRecorded) {
  Example x;
  Ids load(6, 0);
  EXPECT_EQ(x.map({1, 2, 3, 1}, 2, 1, {.load_counter = load.data()}), (Ids{1, 5, -1, -1}));
  EXPECT_EQ(std::accumulate(load.begin(), load.end(), 0), 2);
  EXPECT_EQ(x.map({1, 2}, 2, 0, {.load_counter = load.data()}), (Ids{-1, -1}));
  map_experts(&x.mapping, {}, 2, 0, Rows<std::int32_t>{});
}

TEST(ExpertMapping, R17_FusedSharedColumnsAreNeitherMappedNorRecorded) {
  Example x;
  Ids load(6, 0);
  Ids ids{0, 1, 4, 5};
  map_experts(&x.mapping, {.load_counter = load.data()}, 2, 1, make_rows(ids.data(), 1, 4));
  EXPECT_EQ(ids, (Ids{2, 1, 4, 5}));
  EXPECT_EQ(load, (Ids{0, 1, 1, 0, 0, 0}));
}

TEST(ExpertMapping, RecordingCanBeSwitchedOff) {
  Example x;
  Ids load(6, 0);
  std::int32_t flag = 0;
  x.map({0, 1}, 2, -1, {.load_counter = load.data(), .record = &flag});
  EXPECT_EQ(load, Ids(6, 0));
  flag = 1;
  x.map({0, 1}, 2, -1, {.load_counter = load.data(), .record = &flag});
  EXPECT_EQ(load, (Ids{0, 1, 1, 0, 0, 0}));
}

TEST(ExpertMapping, LocalAndNodeFirst) {
  Example x;  // physical 2, 4, 3 are expert 0; three ranks own two each
  x.mapping.ep_size = 3;
  x.mapping.policy = ReplicaPolicy::local_first;
  for (auto [rank, want] : {std::pair{1, 2}, std::pair{2, 4}}) {
    x.mapping.source_rank = rank;
    EXPECT_EQ(x.map({0, 0, 0}, 1), (Ids{want, want, want}));
  }
  x.mapping.source_rank = 0;  // owns none: the token policy
  EXPECT_EQ(x.map({0, 0, 0}, 1), (Ids{2, 4, 3}));
  Ids const owner{0, 1, 3, 2, 1, 0};
  x.mapping.ep_size = 4;
  x.mapping.physical_to_rank = owner.data();
  x.mapping.policy = ReplicaPolicy::node_first;
  x.mapping.ranks_per_node = 2;
  x.mapping.source_rank = 0;  // node 0 owns physical 4 through rank 1
  EXPECT_EQ(x.map({0, 0}, 1), (Ids{4, 4}));
  x.mapping.source_rank = 2;
  EXPECT_EQ(x.map({0, 0}, 1), (Ids{2, 2}));
}

TEST(ExpertMapping, Errors) {
  Example x;
  EXPECT_NO_THROW(validate(x.mapping));
  auto m = x.mapping;
  m.logical_to_physical = nullptr;
  expect_error(ErrorCode::state, "EPLB enabled but logical_to_physical is not set", [&] { validate(m); });
  m = x.mapping;
  m.replica_count = nullptr;
  expect_error(ErrorCode::state, "EPLB enabled but replica_count is not set", [&] { validate(m); });
  LoadRecorder const none;
  expect_error(ErrorCode::state, "EPLB enabled but load counter is not set", [&] { validate(x.mapping, &none); });
  m = x.mapping;
  m.ep_size = 4;
  expect_error(ErrorCode::config, "num_physical: 6 is not divisible by ep_size 4", [&] { validate(m); });
  m = x.mapping;
  m.num_physical = 3;
  expect_error(ErrorCode::config, "num_physical: 3 is below num_experts 4", [&] { validate(m); });
  m = x.mapping;
  m.source_rank = 1;
  expect_error(ErrorCode::config, "source_rank: 1 is out of range [0, 1)", [&] { validate(m); });
}

TEST(CaptureHook, RecorderKeepsRowsAndFilesReplayThem) {
  RoutingRecorder recorder(2);
  CaptureHook const hook = recorder.hook();
  Ids const ids{0, 1, 2, 3, -1, -1};
  std::vector<float> const w{.5F, .5F, .25F, .75F, 0.0F, 0.0F};
  hook.observe(hook.state, 1, make_rows(ids.data(), 3, 2), make_rows(w.data(), 3, 2), 2);
  hook.observe(hook.state, 1, make_rows(ids.data(), 3, 2), make_rows(w.data(), 3, 2), 1);
  EXPECT_EQ(recorder.layer(1).ids, (Ids{0, 1, 2, 3, 0, 1}));
  auto const path = std::filesystem::path(testing::TempDir()) / "routing_record.bin";
  recorder.write(path);
  RoutingRecorder const back = RoutingRecorder::read(path);
  EXPECT_EQ(back.num_layers(), 2);
  EXPECT_EQ(back.layer(1).ids, recorder.layer(1).ids);
  EXPECT_EQ(back.layer(1).weights, recorder.layer(1).weights);
  EXPECT_EQ(back.layer(0).rows(), 0);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 3);
  expect_error(ErrorCode::argument, "is truncated", [&] { RoutingRecorder::read(path); });
  std::ofstream(path) << "something else that is long enough";
  expect_error(ErrorCode::argument, "is not a routing record", [&] { RoutingRecorder::read(path); });
  std::filesystem::remove(path);
  expect_error(ErrorCode::argument, "cannot be read", [&] { RoutingRecorder::read(path); });
  expect_error(ErrorCode::argument, "layer: 2 is out of range [0, 2)",
               [&] { recorder.add(2, make_rows(ids.data(), 1, 2), make_rows(w.data(), 1, 2), 1); });
}

TEST(ZeroExperts, R18_AllChosenAreZeroExperts) {
  std::vector<float> const x{1.0F, -2.0F, 3.0F, 4.0F};
  Ids const all{4, 5, 1, 4};
  std::vector<float> const weights{.5F, .25F, .75F, .125F};
  std::vector<float> out(4, 10.0F);
  auto const add = [&](ZeroExpertKind kind) {
    add_zero_experts(4, kind, 2, make_rows(x.data(), 2, 2), make_rows(all.data(), 2, 2), make_rows(weights.data(), 2, 2),
                     make_rows(out.data(), 2, 2));
  };
  add(ZeroExpertKind::none);
  EXPECT_EQ(out, std::vector<float>(4, 10.0F));
  add(ZeroExpertKind::identity);
  EXPECT_EQ(out, (std::vector<float>{10.75F, 8.5F, 10.375F, 10.5F}));
  float const nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> const poisoned{nan, nan, 3.0F, 4.0F};
  Ids const real{1, 2, 1, 4};
  add_zero_experts(4, ZeroExpertKind::identity, 2, make_rows(poisoned.data(), 2, 2), make_rows(real.data(), 2, 2),
                   make_rows(weights.data(), 2, 2), make_rows(out.data(), 2, 2));
  EXPECT_EQ(out, (std::vector<float>{10.75F, 8.5F, 10.75F, 11.0F})) << "a row without zero experts is not read";
  for (ZeroExpertKind kind : {ZeroExpertKind::identity, ZeroExpertKind::none}) {  // nothing is left to dispatch
    Ids ids = all;
    std::vector<float> w = weights;
    bool const identity = kind == ZeroExpertKind::identity;
    EXPECT_EQ(take_zero_experts(4, kind, 2, ids.data(), w.data()), identity ? .75F : 0.0F);
    EXPECT_EQ(take_zero_experts(4, kind, 2, ids.data() + 2, w.data() + 2), identity ? .125F : 0.0F);
    EXPECT_EQ(ids, (Ids{-1, -1, 1, -1}));
    EXPECT_EQ(w, (std::vector<float>{0, 0, .75F, 0}));
  }
}

TEST(IndexDtype, R24_NegativeIdInUnsigned) {
  Ids const ids{3, 0, -1, 2};
  std::vector<std::uint32_t> u(4, 7);
  std::vector<std::int64_t> i(4);
  expect_error(ErrorCode::unsupported, "negative id in uint32: topk_ids[1, 0] = -1",
               [&] { convert_ids<std::uint32_t>(make_rows(ids.data(), 2, 2), make_rows(u.data(), 2, 2)); });
  EXPECT_EQ(u, std::vector<std::uint32_t>(4, 7));
  convert_ids<std::uint32_t>(make_rows(ids.data(), 2, 2), make_rows(u.data(), 2, 2), NegativeId::sentinel);
  EXPECT_EQ(u[2], std::numeric_limits<std::uint32_t>::max());
  convert_ids<std::int64_t>(make_rows(ids.data(), 2, 2), make_rows(i.data(), 2, 2));
  EXPECT_EQ(i, (std::vector<std::int64_t>{3, 0, -1, 2}));
}

struct Capacity {
  RouterConfig config;
  std::vector<float> logits;
  Ids ids;
  std::vector<float> weights;
  RouteCounters counters;
  void run(double factor, std::int64_t rows) {
    ids.assign(static_cast<std::size_t>(rows * config.num_slots()), -7);
    weights.assign(ids.size(), -7.0F);
    CapacityTopK(CapacityTopK::Params{config, factor})
        .select(RouteArgs<float>{.logits = make_rows<dynamic, float const>(logits.data(), rows, config.num_logits()),
                                 .num_valid_rows = rows,
                                 .topk_ids = make_rows(ids.data(), rows, config.num_slots()),
                                 .topk_weights = make_rows(weights.data(), rows, config.num_slots()),
                                 .counters = &counters});
  }
};

TEST(CapacityRouting, OverflowTakesTheNextBestExpert) {
  Capacity c;
  c.config.num_experts = 4;
  c.config.topk = 1;
  c.logits = {4, 3, 2, 1, 4, 3, 2, 1, 4, 3, 2, 1, 4, 3, 2, 1};  // all four tokens prefer 0, then 1, ...
  c.run(1.0, 4);                                                // one slot an expert
  EXPECT_EQ(c.ids, (Ids{0, 1, 2, 3}));
  double const sum = 1 + std::exp(-1.0) + std::exp(-2.0) + std::exp(-3.0);
  EXPECT_NEAR(c.weights[1], std::exp(-1.0) / sum, 1e-6);  // the score of the expert taken
  c.run(2.0, 4);
  EXPECT_EQ(c.ids, (Ids{0, 0, 1, 1}));
  c.run(4.0, 4);
  EXPECT_EQ(c.ids, (Ids{0, 0, 0, 0}));
  c.run(0.25, 4);  // ceil(0.25): one slot an expert
  EXPECT_EQ(c.ids, (Ids{0, 1, 2, 3}));
  EXPECT_EQ(c.counters.degenerate_rows, 0);
  EXPECT_EQ(expert_capacity(1.25, 10, 3, 7), 6);
}

TEST(CapacityRouting, GroupsCountByTheExpertsThatAreLeft) {
  Capacity c;
  c.config.num_experts = 4;
  c.config.topk = 1;
  c.config.scoring = moe::routing::Scoring::sigmoid;
  c.config.num_expert_group = 2;
  c.config.topk_group = 1;
  c.config.group_score = moe::routing::GroupScore::top2_sum;
  c.logits = {3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0};
  c.run(1.0, 4);  // with one free expert per group, the better group; the last row gets the last expert
  EXPECT_EQ(c.ids, (Ids{0, 2, 1, 3}));
  c.config.group_score = moe::routing::GroupScore::max;
  c.run(1.0, 4);
  EXPECT_EQ(c.ids, (Ids{0, 1, 2, 3}));

  // While no expert is full, groups are scored as in grouped top-k: a group with a disabled expert among its two best is not kept.
  std::vector<float> const bias{-moe::routing::detail::kInfinity, 0, 0, 0};
  c.config.group_score = moe::routing::GroupScore::top2_sum;
  c.config.correction_bias = bias.data();
  c.run(4.0, 4);
  EXPECT_EQ(c.ids, (Ids{2, 2, 2, 2}));
}

TEST(CapacityRouting, NeverExceedsTheCapacity) {
  Capacity c;
  c.config.num_experts = 16;
  c.config.topk = 4;
  c.config.renorm = Renorm::sum;
  std::mt19937 gen(3);
  std::normal_distribution<float> normal(0.0F, 3.0F);
  c.logits.resize(200 * 16);
  for (std::size_t i = 0; i < c.logits.size(); ++i) c.logits[i] = normal(gen) + (i % 16 < 3 ? 4.0F : 0.0F);
  c.run(1.2, 200);
  Ids load(16, 0);
  for (std::int32_t id : c.ids) {
    if (id >= 0) ++load[static_cast<std::size_t>(id)];
  }
  EXPECT_EQ(*std::max_element(load.begin(), load.end()), 60);
  EXPECT_EQ(std::accumulate(load.begin(), load.end(), 0), 800);
  expect_error(ErrorCode::config, "capacity_factor: 0 is not above 0", [&] { c.run(0.0, 1); });
}

TEST(CustomRouter, ResultsAreChecked) {
  std::vector<float> const logits{1, 2, 3, 4, 5, 6};
  Ids ids(4);
  std::vector<float> weights(4);
  RouteArgs<float> const args{.logits = make_rows<dynamic, float const>(logits.data(), 2, 3),
                              .num_valid_rows = 1,
                              .topk_ids = make_rows(ids.data(), 2, 2),
                              .topk_weights = make_rows(weights.data(), 2, 2)};
  Ids give{2, 0};
  float weight = 0.5F;
  auto const f = [&](Rows<float const> z, int k, bool, Rows<std::int32_t> out, Rows<float> w) {
    EXPECT_EQ(z.extent(0), 1);
    for (int j = 0; j < k; ++j) {
      out(0, j) = give[static_cast<std::size_t>(j)];
      w(0, j) = weight;
    }
  };
  CustomRouter<decltype(f)> const router({.num_experts = 3, .topk = 2, .renormalize = false, .function = f});
  router.select(args);
  EXPECT_EQ(ids, (Ids{2, 0, -1, -1}));
  give = {2, 3};
  expect_error(ErrorCode::argument, "topk_ids[0, 1]: 3 is out of range [-1, 3)", [&] { router.select(args); });
  give = {2, 2};
  expect_error(ErrorCode::argument, "2 occurs twice", [&] { router.select(args); });
  give = {2, 1};
  weight = std::numeric_limits<float>::infinity();
  expect_error(ErrorCode::argument, "is not finite", [&] { router.select(args); });
}

}  // namespace
