// SPDX-License-Identifier: Apache-2.0
// tests/unit/routing_expert_capacity_test.cpp: the capacity of Switch Transformers: which tokens lose their expert, what a layer makes of
// them, and calls for which it cannot be decided.
#include "moe/routing/row/expert_capacity.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "expect_error.hpp"
#include "moe/activation/activation.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/reference.hpp"
#include "moe/io/layer_description_json.hpp"
#include "moe/io/layer_from_config.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/route.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"

namespace {

using namespace moe;
using routing::RouterConfig;
using Ids = std::vector<std::int32_t>;

constexpr int kExperts = 3;
RouterConfig config(std::int64_t capacity, int topk = 1) { return {.num_experts = kExperts, .topk = topk, .expert_capacity = capacity}; }

/// Logits of which `choices` are the largest of each row.
std::vector<float> logits_of(Ids const& choices) {
  std::vector<float> logits(choices.size() * kExperts, 0.0F);
  for (std::size_t t = 0; t < choices.size(); ++t) logits[t * kExperts + static_cast<std::size_t>(choices[t])] = 2.0F;
  return logits;
}

struct Routed {
  Ids ids;
  std::vector<float> weights;
};
Routed route(Ids const& choices, std::int64_t capacity, std::int64_t sequence_length, std::int64_t valid = -1) {
  auto const rows = static_cast<std::int64_t>(choices.size());
  std::vector<float> const logits = logits_of(choices);
  Routed out{Ids(choices.size(), 7), std::vector<float>(choices.size(), 7.0F)};
  routing::AnyRouter const router(config(capacity));
  router.select(routing::RouteArgs<float>{.logits = make_rows(logits.data(), rows, kExperts),
                                          .num_valid_rows = valid < 0 ? rows : valid,
                                          .topk_ids = make_rows(out.ids.data(), rows, 1),
                                          .topk_weights = make_rows(out.weights.data(), rows, 1),
                                          .sequence_length = sequence_length});
  return out;
}

/// token_priority = cumsum(one_hot(choice)) over a sequence; kept where it is at most the capacity.
TEST(ExpertCapacity, TheFirstTokensOfEachSequenceKeepTheirExpert) {
  Ids const choices{0, 0, 1, 0, 0, 1, /* second sequence */ 0, 1, 1, 1, 2, 0};
  Routed const two = route(choices, 2, 6);
  EXPECT_EQ(two.ids, (Ids{0, 0, 1, -1, -1, 1, 0, 1, 1, -1, 2, 0}));
  for (std::size_t t = 0; t < choices.size(); ++t) EXPECT_EQ(two.weights[t] > 0, two.ids[t] >= 0) << t;
  EXPECT_EQ(route(choices, 1, 6).ids, (Ids{0, -1, 1, -1, -1, -1, 0, 1, -1, -1, 2, -1}));
  EXPECT_EQ(route(choices, 2, 12).ids, (Ids{0, 0, 1, -1, -1, 1, -1, -1, -1, -1, 2, -1})) << "one sequence";
  EXPECT_EQ(route(choices, 2, 5).ids, (Ids{0, 0, 1, -1, -1, 1, 0, 1, -1, -1, 2, 0})) << "the last sequence is shorter";
  EXPECT_EQ(route(choices, 2, 6, 3).ids, (Ids{0, 0, 1, -1, -1, -1, -1, -1, -1, -1, -1, -1})) << "padding";
}

TEST(ExpertCapacity, NeedsNoSequenceLengthWhereItCannotBind) {
  Ids const choices{0, 0, 0, 1};
  EXPECT_EQ(route(choices, 0, 0).ids, choices) << "no capacity";
  EXPECT_EQ(route(choices, 4, 0).ids, choices) << "no more rows than an expert takes";
  EXPECT_EQ(route(choices, 2, 2).ids, choices) << "sequences no longer than an expert takes";
  EXPECT_EQ(route(choices, 1, 1).ids, choices) << "one token of each sequence";
}

TEST(ExpertCapacity, UnknownSequencesAreRefused) {
  moe_test::expect_error(ErrorCode::argument, "sequence_length: not given. Of 4 rows an expert takes at most expert_capacity 3",
                         [] { route({0, 0, 0, 1}, 3, 0); });
  moe_test::expect_error(ErrorCode::argument, "sequence_length: -1 is below 0", [] { route({0}, 0, -1); });
  moe_test::expect_error(ErrorCode::config, "expert_capacity: 3 with top_k 2", [] { routing::AnyRouter router(config(3, 2)); });
  moe_test::expect_error(ErrorCode::config, "expert_capacity: -1 is below 0", [] { routing::AnyRouter router(config(-1)); });
}

TEST(ExpertCapacity, OnTheDeviceItIsRefusedWhereItCouldBind) {
  std::vector<float> const logits(12);
  Ids ids(4);
  std::vector<float> weights(4);
  routing::FusedRouting<float> fused;
  fused.args = {.logits = make_rows(logits.data(), 4, kExperts),
                .num_valid_rows = 4,
                .topk_ids = make_rows(ids.data(), 4, 1),
                .topk_weights = make_rows(weights.data(), 4, 1),
                .sequence_length = 4};
  EXPECT_NO_THROW(routing::check_fused(config(4), fused));
  moe_test::expect_error(ErrorCode::unsupported, "expert_capacity: 3 tokens of a sequence of 4 is applied in the host space only",
                         [&] { routing::check_fused(config(3), fused); });
}

struct Tiny : LayerDefaults {
  using Act = float;
  using Weight = float;
  using Activation = activation::Silu;
};

TEST(ExpertCapacity, ALayerGivesZeroRowsToTokensWithoutAnExpert) {
  using Layer = ModularKernel<Tiny, routing::AnyRouter, quantization::None, backends::NoExpertParallel<>, experts::Reference<float>>;
  constexpr std::int64_t kHidden = 4, kRows = 4;
  experts::WeightStore<Tiny, quantization::None> weights(kExperts, kHidden, 4, true);
  std::vector<float> const w13(32, 0.5F), w2(16, 0.25F);
  for (int e = 0; e < kExperts; ++e) weights.set_expert(e, w13.data(), w2.data());
  comm::Self<> self;
  Layer layer(self, weights.view(),
              {.shape = {kHidden, 4, kExperts, 1, false},
               .max_tokens_per_rank = kRows,
               .placement = ExpertPlacement(kExperts, 1),
               .router = config(1)});
  std::vector<float> const hidden(kRows * kHidden, 1.0F), logits = logits_of({0, 0, 1, 0});
  std::vector<float> output(hidden.size());
  auto forward = [&](ForwardOptions const& options) {
    layer.forward(make_rows(hidden.data(), kRows, kHidden), make_rows(logits.data(), kRows, kExperts),
                  make_rows(output.data(), kRows, kHidden), options);
    std::vector<bool> zero;
    for (std::size_t t = 0; t < kRows; ++t) zero.push_back(output[t * kHidden] == 0.0F);
    return zero;
  };
  EXPECT_EQ(forward({.sequence_length = 4}), (std::vector<bool>{false, true, false, true}));
  EXPECT_EQ(forward({.sequence_length = 2}), (std::vector<bool>{false, true, false, false}));
  moe_test::expect_error(ErrorCode::argument, "Set ForwardOptions::sequence_length", [&] { forward({}); });
}

/// Logits from outside, two rows a pass.
struct Chunked : RunnerDefaults {
  using Gate = runner::gate::Outside;
  using Chunking = runner::chunking::Lockstep;
};
TEST(ExpertCapacity, ChunksOfARunnerAreWholeSequences) {
  using Layer = ModularKernel<Tiny, routing::AnyRouter, quantization::None, backends::NoExpertParallel<>, experts::Reference<float>>;
  constexpr std::int64_t kHidden = 4, kRows = 8;
  experts::WeightStore<Tiny, quantization::None> weights(kExperts, kHidden, 4, true);
  std::vector<float> const w13(32, 0.5F), w2(16, 0.25F);
  for (int e = 0; e < kExperts; ++e) weights.set_expert(e, w13.data(), w2.data());
  comm::Self<> self;
  std::vector<float> const hidden(kRows * kHidden, 1.0F), logits = logits_of({0, 0, 0, 0, 1, 0, 1, 1});
  auto zero_rows = [&](int chunk, std::int64_t sequence_length) {
    using Block = Runner<Layer, Chunked>;
    typename Block::Params p{.layer = {.shape = {kHidden, 4, kExperts, 1, false},
                                       .max_tokens_per_rank = kRows,
                                       .placement = ExpertPlacement(kExperts, 1),
                                       .router = config(1)}};
    p.chunking.rows = chunk;
    Block block(self, weights.view(), p);
    std::vector<float> output(hidden.size());
    block.forward(make_rows(hidden.data(), kRows, kHidden), make_rows(logits.data(), kRows, kExperts),
                  make_rows(output.data(), kRows, kHidden), {.sequence_length = sequence_length});
    std::vector<bool> zero;
    for (std::size_t t = 0; t < kRows; ++t) zero.push_back(output[t * kHidden] == 0.0F);
    return zero;
  };
  std::vector<bool> const fours{false, true, true, true, false, false, true, true},
      twos{false, true, false, true, false, false, false, true};
  EXPECT_EQ(zero_rows(8, 4), fours);
  EXPECT_EQ(zero_rows(4, 4), fours);
  EXPECT_EQ(zero_rows(4, 2), twos);
  moe_test::expect_error(ErrorCode::unsupported, "is counted over a sequence of 4 rows, and the batch is cut at row 2",
                         [&] { zero_rows(2, 4); });
  moe_test::expect_error(ErrorCode::argument, "sequence_length: not given. Of 8 rows, cut at row 1", [&] { zero_rows(1, 0); });
}

TEST(ExpertCapacity, OfASwitchCheckpointReachesTheRouter) {
  auto const c = io::HfConfig::from_text(R"({"model_type": "switch_transformers", "d_model": 64, "d_ff": 48, "num_experts": 8,
    "expert_capacity": 2, "num_layers": 1, "num_sparse_encoder_layers": 1, "num_decoder_layers": 1, "num_sparse_decoder_layers": 0,
    "dense_act_fn": "relu", "router_bias": false, "encoder_sparse_step": 1})",
                                         "config.json");
  EXPECT_EQ(io::from_config(c, 0).router.expert_capacity, 2);
}

}  // namespace
