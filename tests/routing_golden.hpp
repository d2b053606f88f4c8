// SPDX-License-Identifier: Apache-2.0
// tests/routing_golden.hpp: the routing of every model family's own code, from the logits in its file: ids as sets, weights. The tests are
// the same for the host and the device: tests/routing_batch.hpp.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "golden_dir.hpp"
#include "moe/io/safetensors.hpp"
#include "moe/routing/any_router.hpp"
#include "routing_batch.hpp"

namespace {

using namespace moe;
using namespace moe::routing;

/// The routing that a block file's metadata describes, with the tables that it points to.
struct BlockRouting {
  RouterConfig config;
  std::vector<float> bias, scale;
  std::vector<std::int64_t> table, tokens;
};

std::string const* find(io::SafetensorsFile const& file, std::string const& key) {
  auto const at = file.metadata().find(key);
  return at == file.metadata().end() || at->second == "none" ? nullptr : &at->second;
}
int integer(io::SafetensorsFile const& file, std::string const& key) {
  std::string const* v = find(file, key);
  return v == nullptr ? 0 : std::stoi(*v);
}
float real(io::SafetensorsFile const& file, std::string const& key, float otherwise) {
  std::string const* v = find(file, key);
  return v == nullptr ? otherwise : std::stof(*v);
}
/// The one tensor whose name has this suffix.
std::string named(io::SafetensorsFile const& file, std::initializer_list<std::string_view> endings) {
  for (auto const& [tensor, info] : file.tensors()) {
    for (std::string_view ending : endings) {
      if (tensor.ends_with(ending)) return tensor;
    }
  }
  throw Error(ErrorCode::argument, "no tensor of the expected name in " + file.label());
}

BlockRouting describe(io::SafetensorsFile const& file) {
  BlockRouting b;
  RouterConfig& c = b.config;
  std::string const family = file.metadata().at("routing_family");
  c.num_experts = integer(file, "num_experts");
  c.topk = integer(file, "top_k");
  c.scoring = parse_scoring(file.metadata().at("scoring_func"));
  c.num_zero_experts = integer(file, "num_zero_experts") + integer(file, "num_skip_experts");
  c.order = file.metadata().at("selection") == "topk_of_logits" ? Order::topk_then_score : Order::score_then_topk;
  c.routed_scaling_factor = real(file, "routed_scaling_factor", 1.0F);
  c.logit_softcap = real(file, "logit_softcapping", 0.0F);
  if (file.metadata().at("norm_topk_prob") == "true") {
    c.renorm = Renorm::sum;
    c.renorm_eps = real(file, "renorm_eps", 0.0F);
    if (std::string const* floor = find(file, "renorm_min")) {
      c.renorm = Renorm::floor;
      c.renorm_eps = std::stof(*floor);
    }
    if (std::string const* p = find(file, "renorm_p")) {
      c.renorm = Renorm::p_norm;
      c.renorm_p = std::stof(*p);
    }
  }
  if (integer(file, "n_group") > 1) {
    c.num_expert_group = integer(file, "n_group");
    c.topk_group = integer(file, "topk_group");
    c.group_score = file.metadata().at("group_score") == "top2_sum" ? GroupScore::top2_sum : GroupScore::max;
  }
  if (file.metadata().at("correction_bias") == "selection_only") {
    b.bias = file.read<float>(named(file, {"e_score_correction_bias", "expert_bias", "balancing_biases", "gate.bias", "router_bias"}));
    // ERNIE-4.5-VL: the first row is that of the text tokens, the second that of the image tokens.
    if (find(file, "tokens") != nullptr) b.bias.resize(static_cast<std::size_t>(c.num_experts));
    check_bias_length(static_cast<std::int64_t>(b.bias.size()), c.num_experts, c.num_zero_experts);
    c.correction_bias = b.bias.data();
  }
  if (find(file, "per_expert_scale") != nullptr) {
    b.scale = file.read<float>(named(file, {"per_expert_scale"}));
    c.per_expert_scale = b.scale.data();
  }
  if (family == "sparsemixer") {
    c.selection = Selection::sparsemixer;
    c.sparsemixer_eps = real(file, "router_jitter_noise", 0.0F);
  }
  if (family == "sqrtsoftplus_hash") {
    std::string const name = named(file, {"tid2eid"});
    b.table = file.read<std::int64_t>(name);
    c.selection = Selection::hash_table;
    c.hash_table = b.table.data();
    c.vocabulary = file.at(name).shape[0];
    b.tokens = file.read<std::int64_t>("input_ids");
  }
  if (find(file, "expert_of_id") != nullptr) {
    for (std::int64_t e = 0; e < c.num_experts; ++e) b.table.push_back(e);
    c.selection = Selection::hash_table;
    c.hash_table = b.table.data();
    c.vocabulary = c.num_experts;
    b.tokens = file.read<std::int64_t>("input_ids");
  }
  if (family == "joint_shared_sigmoid") {
    c.num_joint_shared = integer(file, "shared_experts");
    c.routed_scaling_factor *= file.read<float>(named(file, {"gate.global_scale"}))[0];
  }
  if (family == "mlp_router_skip") c.zero_expert_kind = ZeroExpertKind::none;
  return b;
}

class RoutingGolden : public testing::TestWithParam<std::filesystem::path> {};

TEST_P(RoutingGolden, IdsAsSetsAndWeights) {
  io::SafetensorsFile const file(GetParam());
  BlockRouting const b = describe(file);
  AnyRouter const router(b.config);
  auto const logits = file.read<float>("router_logits");
  auto const want_ids = file.read<std::int32_t>("topk_ids");
  auto const want_weights = file.read<float>("topk_weights");
  std::int64_t const rows = file.at("router_logits").shape[0];
  int const k = router.topk();
  ASSERT_EQ(file.at("router_logits").shape[1], router.num_logits());
  ASSERT_EQ(file.at("topk_ids").shape[1], k);
  std::vector<std::int32_t> ids(want_ids.size());
  std::vector<float> weights(want_weights.size());
  std::vector<float> shared(static_cast<std::size_t>(rows * b.config.num_joint_shared));
  RouteCounters counters;
  RouteArgs<float> args{.logits = make_rows(logits.data(), rows, router.num_logits()),
                        .num_valid_rows = rows,
                        .token_ids = b.tokens.empty() ? nullptr : b.tokens.data(),
                        .topk_ids = make_rows(ids.data(), rows, k),
                        .topk_weights = make_rows(weights.data(), rows, k),
                        .counters = &counters,
                        .shared_weights = make_rows(shared.data(), rows, b.config.num_joint_shared)};
  moe_test::select_batch(b.config, args);
  EXPECT_EQ(counters.degenerate_rows, 0);
  for (std::int64_t t = 0; t < rows; ++t) {
    std::map<std::int32_t, float> got;
    std::map<std::int32_t, float> want;
    for (std::int64_t i = t * k; i < (t + 1) * k; ++i) {
      auto const at = static_cast<std::size_t>(i);
      bool const skipped = b.config.zero_expert_kind == ZeroExpertKind::none && ids[at] >= b.config.num_experts;
      got[skipped ? 0 : ids[at]] = skipped ? 0.0F : weights[at];  // Zaya's gate reports a skip as expert 0 with weight 0
      want[want_ids[at]] = want_weights[at];
    }
    ASSERT_EQ(got.size(), want.size());
    for (auto const& [id, weight] : want) {
      ASSERT_TRUE(got.contains(id)) << "row " << t << " lacks expert " << id;
      EXPECT_NEAR(got[id], weight, 1e-5 * std::abs(weight)) << "row " << t << " expert " << id;
    }
  }
  if (b.config.num_joint_shared > 0) {
    auto const gammas = file.read<float>("shared_gammas");
    ASSERT_EQ(gammas.size(), shared.size());
    for (std::size_t i = 0; i < gammas.size(); ++i) EXPECT_NEAR(shared[i], gammas[i], 1e-5 * std::abs(gammas[i]));
  }
}

INSTANTIATE_TEST_SUITE_P(Blocks, RoutingGolden, testing::ValuesIn(moe_test::golden_blocks()),
                         [](auto const& info) { return info.param.stem().string(); });

}  // namespace
