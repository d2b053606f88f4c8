// SPDX-License-Identifier: Apache-2.0
// tests/gpu/routing_test.cu: the routing kernel against the host: ids, weights, mapping, load and permutation, bit for bit.
// moe-alone: the registers of its kernels are tested.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "tests/gpu/routing_case.cuh"

namespace {

using namespace moe;
using namespace moe::routing;
using namespace moe_test;

void expect_same(Case const& c) {
  AnyRouter const router(c.config);
  moe_test::expect_same<float>(router, router, c);
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

// The copies of the fused shared experts that a row's columns name, and the logical ids beside them.
TEST(RoutingKernel, NamesCopiesOfSharedExperts) {
  constexpr int kExperts = 24, kTopK = 4, kFused = 2, kSlots = kTopK + kFused;
  constexpr std::int64_t kRows = 333, kValid = 300;
  RouterConfig c = config(kExperts, kTopK, Scoring::softmax);
  c.num_fused_shared = kFused;
  std::vector<float> const logits = logits_of({.config = c, .rows = kRows});
  OnDevice<float> d_logits(logits), weights(std::vector<float>(kRows * kSlots));
  for (int ranks : {1, 3}) {
    SharedCopies const copies{.first = 97, .ranks = ranks};
    OnDevice<std::int32_t> ids(std::vector<std::int32_t>(kRows * kSlots, -77)), logical(std::vector<std::int32_t>(kRows * kSlots, -77));
    FusedRouting<float> f;
    f.args = {.logits = make_rows<dynamic, float const>(d_logits.data(), kRows, kExperts),
              .num_valid_rows = kValid,
              .topk_ids = make_rows(ids.data(), kRows, kSlots),
              .topk_weights = make_rows(weights.data(), kRows, kSlots)};
    f.logical_ids = logical.data();
    f.logical_stride = kSlots;
    route_fused(AnyRouter(c), f, nullptr);
    name_shared(copies, kExperts, kTopK, f.args.topk_ids, make_rows(logical.data(), kRows, kSlots), nullptr);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::vector<std::int32_t> const got = ids.get(), before = logical.get();
    for (std::int64_t t = 0; t < kRows; ++t) {
      for (int j = 0; j < kSlots; ++j) {
        auto const i = static_cast<std::size_t>(t * kSlots + j);
        bool const fused = j >= kTopK, valid = t < kValid;
        ASSERT_EQ(before[i] < 0, !valid) << t << ", " << j;
        if (fused && valid) {
          ASSERT_EQ(before[i], kExperts + j - kTopK) << t;
          ASSERT_EQ(got[i], 97 + t % ranks * kFused + j - kTopK) << t;
        } else {
          ASSERT_EQ(got[i], before[i]) << t << ", " << j;
        }
      }
    }
  }
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
  FusedRouting<float> f;
  f.args = {.logits = make_rows<dynamic, float const>(logits.data(), rows, 128),
            .num_valid_rows = rows,
            .topk_ids = make_rows(ids.data(), rows, 8),
            .topk_weights = make_rows(weights.data(), rows, 8)};
  f.num_valid_rows = valid.data();
  f.recorder = {.load_counter = load.data(), .record = flag.data()};
  f.permutation = {.num_local_experts = 128, .expert_offsets = offsets.data(), .sorted_slots = sorted.data(), .inverse = inverse.data()};
  f.workspace = routing_workspace(128);
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

TEST(RoutingKernel, Refusals) {
  AnyRouter const router(config(8, 2, Scoring::softmax));
  FusedRouting<float> f;
  float dummy = 0.0F;
  f.args.logits = make_rows<dynamic, float const>(&dummy, 4, 9);
  EXPECT_THROW(route_fused(router, f, nullptr), Error);
}

}  // namespace
