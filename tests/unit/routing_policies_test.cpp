// SPDX-License-Identifier: Apache-2.0
// tests/unit/routing_policies_test.cpp: routers over batches: the policies agree with AnyRouter bit for bit, padding, errors, independence
// of rows.
#include "moe/routing/topk_softmax.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "expect_error.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/biased_topk.hpp"
#include "moe/routing/fixed_sizes.hpp"
#include "moe/routing/grouped_topk.hpp"
#include "moe/routing/hash_topk.hpp"
#include "moe/routing/llama4.hpp"
#include "moe/routing/sigmoid_topk.hpp"
#include "moe/routing/softmax_topk.hpp"
#include "moe/routing/sparsemixer.hpp"
#include "moe/routing/zero_expert.hpp"

namespace {

using namespace moe;
using namespace moe::routing;
using moe_test::expect_error;

static_assert(Router<AnyRouter> && Router<Llama4> && Router<SparseMixer> && Router<TopKSoftmax>);
static_assert(Router<SoftmaxTopK<Renormalize::yes>> && Router<SigmoidTopK<Renormalize::no>>);
static_assert(Router<GroupedTopK<Scoring::sigmoid, GroupScore::top2_sum, Renormalize::yes>>);
static_assert(Router<BiasedTopK<Scoring::softmax, Renormalize::yes>> && Router<HashTopK<Scoring::sqrtsoftplus, Renormalize::yes>>);
static_assert(Router<ZeroExpert<Scoring::softmax, Renormalize::no>>);
static_assert(Llama4::kWeightOnInput && !AnyRouter::kWeightOnInput);

struct Batch {
  std::vector<float> logits;
  std::vector<std::int64_t> tokens;
  std::int64_t rows;
};
Batch random_batch(std::int64_t rows, int width, unsigned seed) {
  std::mt19937 gen(seed);
  std::normal_distribution<float> normal(0.0F, 2.0F);
  Batch b{std::vector<float>(static_cast<std::size_t>(rows * width)), std::vector<std::int64_t>(static_cast<std::size_t>(rows)), rows};
  for (float& v : b.logits) v = normal(gen);
  for (auto& t : b.tokens) t = static_cast<std::int64_t>(gen() % 40);
  return b;
}

struct Routed {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  RouteCounters counters;
};
template <class R>
Routed select(R const& router, Batch const& b, std::int64_t valid = -1) {
  auto const n = static_cast<std::size_t>(b.rows * router.num_slots());
  Routed out{std::vector<std::int32_t>(n, 77), std::vector<float>(n, 77.0F), {}};
  RouteArgs<float> const args{.logits = make_rows(b.logits.data(), b.rows, router.num_logits()),
                              .num_valid_rows = valid < 0 ? b.rows : valid,
                              .token_ids = b.tokens.data(),
                              .topk_ids = make_rows(out.ids.data(), b.rows, router.num_slots()),
                              .topk_weights = make_rows(out.weights.data(), b.rows, router.num_slots()),
                              .counters = &out.counters};
  router.select(args);
  return out;
}

/// The policy's constants at run time must give the policy's bits, and each row must be independent of the others.
template <class R>
void expect_same_as_any(R const& router) {
  Batch const b = random_batch(200, router.num_logits(), 5);
  Routed const a = select(router, b);
  Routed const any = select(AnyRouter(router.resolved()), b);
  EXPECT_EQ(a.ids, any.ids) << R::kName;
  EXPECT_EQ(a.weights, any.weights) << R::kName;
  int const width = router.num_logits();
  int const slots = router.num_slots();
  for (std::int64_t t = 0; t < b.rows; t += 17) {
    Batch const one{{b.logits.begin() + t * width, b.logits.begin() + (t + 1) * width}, {b.tokens[static_cast<std::size_t>(t)]}, 1};
    Routed const alone = select(router, one);
    for (int j = 0; j < slots; ++j) {
      auto const at = static_cast<std::size_t>(t * slots + j);
      EXPECT_EQ(alone.ids[static_cast<std::size_t>(j)], a.ids[at]);
      EXPECT_EQ(alone.weights[static_cast<std::size_t>(j)], a.weights[at]);
    }
  }
}

std::vector<float> const kBias = [] {
  std::vector<float> bias(64);
  for (std::size_t e = 0; e < bias.size(); ++e) bias[e] = 0.1F * static_cast<float>(static_cast<int>(e * 13 % 7) - 3);
  return bias;
}();
std::vector<std::int64_t> const kHash = [] {
  std::vector<std::int64_t> table(40 * 3);
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = static_cast<std::int64_t>((i * 11 + i / 3) % 16);
  return table;
}();

TEST(RoutingPolicies, AgreeWithAnyRouterAndTreatRowsAlone) {
  expect_same_as_any(SoftmaxTopK<Renormalize::no>({.num_experts = 64, .topk = 6}));
  expect_same_as_any(SoftmaxTopK<Renormalize::yes>({.num_experts = 60, .topk = 4, .num_fused_shared = 2}));
  expect_same_as_any(SigmoidTopK<Renormalize::yes>({.num_experts = 16, .topk = 4, .routed_scaling_factor = 2.5F}));
  expect_same_as_any(TopKSoftmax({.num_experts = 32, .topk = 4}));
  expect_same_as_any(GroupedTopK<Scoring::sigmoid, GroupScore::top2_sum, Renormalize::yes>({.num_experts = 64,
                                                                                            .topk = 8,
                                                                                            .num_expert_group = 8,
                                                                                            .topk_group = 4,
                                                                                            .correction_bias = kBias.data(),
                                                                                            .routed_scaling_factor = 2.5F}));
  expect_same_as_any(GroupedTopK<Scoring::softmax, GroupScore::max, Renormalize::no>(
      {.num_experts = 160, .topk = 6, .num_expert_group = 8, .topk_group = 3}));
  expect_same_as_any(BiasedTopK<Scoring::softmax, Renormalize::yes>(
      {.num_experts = 64, .topk = 6, .correction_bias = kBias.data(), .renorm = Renorm::floor, .renorm_eps = 1e-12F}));
  expect_same_as_any(BiasedTopK<Scoring::sqrtsoftplus, Renormalize::yes>({.num_experts = 64, .topk = 6, .correction_bias = kBias.data()}));
  expect_same_as_any(
      HashTopK<Scoring::sqrtsoftplus, Renormalize::yes>({.num_experts = 16, .topk = 3, .hash_table = kHash.data(), .vocabulary = 40}));
  expect_same_as_any(SparseMixer({.num_experts = 16}));
  expect_same_as_any(Llama4({.num_experts = 16}));
  expect_same_as_any(ZeroExpert<Scoring::softmax, Renormalize::no>(
      {.num_experts = 48, .num_zero_experts = 16, .topk = 6, .correction_bias = kBias.data()}));
}

template <int E, int K, int Z = 0>
struct Sizes {
  static constexpr int num_experts = E, topk = K, num_zero_experts = Z;
};
struct OpenSizes : LayerDefaults {};
/// A router that selects by itself: its kernel is not the one of its configuration.
struct OwnSelection : SoftmaxTopK<Renormalize::yes> {
  using SoftmaxTopK<Renormalize::yes>::SoftmaxTopK;
  template <class L>
  void select(RouteArgs<L> const&, Stream<space::cuda>) const {}
};
using Softmax8 = SoftmaxTopK<Renormalize::yes>;
static_assert(Router<Fixed<Softmax8, Sizes<60, 4>>> && Fixed<Llama4, Sizes<16, 1>>::kWeightOnInput);
static_assert(TakesFixedSizes<Softmax8> && TakesFixedSizes<Llama4> && !TakesFixedSizes<AnyRouter> && !TakesFixedSizes<OwnSelection>);
static_assert(std::is_same_v<FixedWherePossible<Softmax8, Sizes<60, 4>>, Fixed<Softmax8, Sizes<60, 4>>>);
static_assert(std::is_same_v<FixedWherePossible<Softmax8, OpenSizes>, Softmax8>);
static_assert(std::is_same_v<FixedWherePossible<AnyRouter, Sizes<60, 4>>, AnyRouter>);

/// The same bits as the router whose sizes are values.
template <class R, class S>
void expect_same_as_fixed(typename R::Params const& p) {
  R const router(p);
  Fixed<R, S> const fixed(p);
  expect_same_as_any(fixed);
  Batch const b = random_batch(200, router.num_logits(), 5);
  Routed const a = select(router, b);
  Routed const same = select(fixed, b);
  EXPECT_EQ(same.ids, a.ids) << R::kName;
  EXPECT_EQ(same.weights, a.weights) << R::kName;
}
TEST(RoutingPolicies, FixedSizesGiveTheSameBits) {
  expect_same_as_fixed<Softmax8, Sizes<60, 4>>({.num_experts = 60, .topk = 4, .routed_scaling_factor = 2.5F});
  expect_same_as_fixed<TopKSoftmax, Sizes<128, 4>>({.num_experts = 128, .topk = 4});
  expect_same_as_fixed<Llama4, Sizes<16, 1>>({.num_experts = 16});
  expect_same_as_fixed<SparseMixer, Sizes<16, 2>>({.num_experts = 16});
  expect_same_as_fixed<GroupedTopK<Scoring::sigmoid, GroupScore::top2_sum, Renormalize::yes>, Sizes<64, 8>>(
      {.num_experts = 64, .topk = 8, .num_expert_group = 8, .topk_group = 4, .correction_bias = kBias.data()});
  expect_same_as_fixed<ZeroExpert<Scoring::softmax, Renormalize::no>, Sizes<48, 6, 16>>(
      {.num_experts = 48, .num_zero_experts = 16, .topk = 6, .correction_bias = kBias.data()});
}

TEST(RoutingPolicies, ManyRowsInParallelAreTheSame) {
  SoftmaxTopK<Renormalize::yes> const router({.num_experts = 128, .topk = 8});
  Batch const b = random_batch(3000, 128, 9);
  Routed const all = select(router, b);
  Routed const again = select(router, b);
  EXPECT_EQ(all.ids, again.ids);
  Batch head = b;
  head.rows = 5;
  Routed const few = select(router, head);
  EXPECT_TRUE(std::equal(few.ids.begin(), few.ids.end(), all.ids.begin()));
  EXPECT_TRUE(std::equal(few.weights.begin(), few.weights.end(), all.weights.begin()));
}

TEST(RoutingPolicies, R10_EmptyAndPadding) {
  SoftmaxTopK<Renormalize::yes> const router({.num_experts = 8, .topk = 2, .num_fused_shared = 1});
  select(router, random_batch(0, 8, 1));
  Batch const b = random_batch(6, 8, 2);
  Routed const full = select(router, b);
  for (std::int64_t valid : {std::int64_t{0}, std::int64_t{4}}) {
    Routed const r = select(router, b, valid);
    for (std::size_t i = 0; i < r.ids.size(); ++i) {
      bool const padding = i >= static_cast<std::size_t>(valid * 3);
      EXPECT_EQ(r.ids[i], padding ? -1 : full.ids[i]);
      EXPECT_EQ(r.weights[i], padding ? 0.0F : full.weights[i]);
    }
  }
}

TEST(RoutingPolicies, R6_CountsDegenerateRows) {
  for (DegeneratePolicy policy : {DegeneratePolicy::uniform_first_k, DegeneratePolicy::drop}) {
    TopKSoftmax const router({.num_experts = 8, .topk = 2, .degenerate = policy});
    Batch b = random_batch(3, 8, 3);
    for (std::size_t e = 8; e < 16; ++e) b.logits[e] = std::numeric_limits<float>::quiet_NaN();
    Routed const r = select(router, b);
    EXPECT_EQ(r.counters.degenerate_rows, 1);
    EXPECT_EQ(r.ids[2], policy == DegeneratePolicy::drop ? -1 : 0);
    EXPECT_EQ(select(router, b, 1).counters.degenerate_rows, 0);  // padding rows are not read
  }
}

TEST(RoutingPolicies, R22_ManyRowsOfManyExperts) {
  std::int64_t const rows = 65536;
  AnyRouter const router([] {
    RouterConfig c;
    c.num_experts = 512;
    c.topk = 10;
    return c;
  }());
  std::vector<bf16> logits(static_cast<std::size_t>(rows * 512));
  std::mt19937 gen(4);
  for (bf16& v : logits) v = from_float<bf16>(static_cast<float>(gen() % 1024) / 128.0F);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * 10), -9);
  std::vector<float> weights(ids.size());
  router.select(RouteArgs<bf16>{.logits = make_rows<dynamic, bf16 const>(logits.data(), rows, 512),
                                .num_valid_rows = rows,
                                .topk_ids = make_rows(ids.data(), rows, 10),
                                .topk_weights = make_rows(weights.data(), rows, 10)});
  for (std::int32_t id : ids) ASSERT_TRUE(id >= 0 && id < 512);
}

RouterConfig config(int e, int k) {
  RouterConfig c;
  c.num_experts = e;
  c.topk = k;
  return c;
}

TEST(RoutingErrors, TopK) {
  for (int k : {0, -3, 9}) {
    expect_error(ErrorCode::config, "top_k: " + std::to_string(k) + " is out of range [1, 8]", [&] { AnyRouter(config(8, k)); });
  }
  expect_error(ErrorCode::config, "top_k: 33 is out of range [1, 32]", [] { AnyRouter(config(64, 33)); });
  RouterConfig c = config(8, 10);
  c.num_zero_experts = 2;
  EXPECT_NO_THROW(AnyRouter{c});  // k may reach E + Z
  expect_error(ErrorCode::config, "1025 logits per token, at most 1024", [] { AnyRouter(config(1025, 2)); });
  expect_error(ErrorCode::config, "num_experts: 0 is below 1", [] { AnyRouter(config(0, 1)); });
}

TEST(RoutingErrors, OtherSizesThanTheFixedOnes) {
  using Fixed60 = Fixed<Softmax8, Sizes<60, 4>>;
  auto const refuses = [](std::string const& part, auto const& p) { expect_error(ErrorCode::config, part, [&] { Fixed60{p}; }); };
  refuses("num_experts: 64, the router is compiled for 60", Softmax8::Params{.num_experts = 64, .topk = 4});
  refuses("topk: 6, the router is compiled for 4", Softmax8::Params{.num_experts = 60, .topk = 6});
  refuses("num_fused_shared: 1, the router is compiled for 0", Softmax8::Params{.num_experts = 60, .topk = 4, .num_fused_shared = 1});
  using Zero = ZeroExpert<Scoring::softmax, Renormalize::no>;
  expect_error(ErrorCode::config, "num_zero_experts: 16, the router is compiled for 8",
               [] { Fixed<Zero, Sizes<48, 6, 8>>({.num_experts = 48, .num_zero_experts = 16, .topk = 6}); });
}

TEST(RoutingErrors, R9_Groups) {
  RouterConfig c = config(16, 4);
  auto const with = [&](int g, int kept, int k = 4) {
    RouterConfig d = c;
    d.num_expert_group = g;
    d.topk_group = kept;
    d.topk = k;
    return d;
  };
  expect_error(ErrorCode::config, "num_expert_group: 3 does not divide num_experts 16", [&] { AnyRouter(with(3, 1)); });
  expect_error(ErrorCode::config, "topk_group: 5 is out of range [1, 4]", [&] { AnyRouter(with(4, 5)); });
  expect_error(ErrorCode::config, "topk_group: 1 groups of 4 experts hold less than top_k 5", [&] { AnyRouter(with(4, 1, 5)); });
  expect_error(ErrorCode::config, "must be set for grouped top-k", [&] { AnyRouter(with(4, 0)); });
  expect_error(ErrorCode::config, "must be set for grouped top-k", [&] { AnyRouter(with(0, 2)); });
  c.correction_bias = kBias.data();
  expect_error(ErrorCode::config, "num_expert_group: 16 leaves groups of 1 expert", [&] { AnyRouter(with(16, 8)); });
  using Grouped = GroupedTopK<Scoring::softmax, GroupScore::max, Renormalize::no>;
  expect_error(ErrorCode::config, "must be set for grouped top-k", [] { Grouped({.num_experts = 16, .topk = 4}); });
  expect_error(ErrorCode::config, "num_expert_group: 4 with num_zero_experts 2", [&] {
    RouterConfig d = with(4, 2);
    d.correction_bias = nullptr;
    d.num_zero_experts = 2;
    AnyRouter{d};
  });
}

TEST(RoutingErrors, R13_Sparsemixer) {
  expect_error(ErrorCode::argument, "top_k: 3, sparsemixer needs 2", [] { SparseMixer({.num_experts = 16, .topk = 3}); });
  expect_error(ErrorCode::argument, "renormalize: true", [] { SparseMixer({.num_experts = 16, .renormalize = true}); });
}

TEST(RoutingErrors, Others) {
  RouterConfig c = config(16, 2);
  c.order = Order::topk_then_score;
  c.correction_bias = kBias.data();
  expect_error(ErrorCode::config, "correction_bias: needs score_then_topk", [&] { AnyRouter{c}; });
  expect_error(ErrorCode::config, "scoring: 'tanh'", [] { (void)parse_scoring("tanh"); });
  EXPECT_EQ(parse_scoring("sqrtsoftplus"), Scoring::sqrtsoftplus);
  expect_error(ErrorCode::config, "topk must be 1", [] { Llama4({.num_experts = 8, .topk = 2}); });
  expect_error(ErrorCode::unsupported, "router_logits: dtype e4m3", [] { check_logits_dtype(DType::e4m3); });
  EXPECT_NO_THROW(check_logits_dtype(DType::f16));
  expect_error(ErrorCode::argument, "correction_bias: length 15, expected 16", [] { check_bias_length(15, 16); });
  expect_error(ErrorCode::argument, "correction_bias: null",
               [] { BiasedTopK<Scoring::sigmoid, Renormalize::no>({.num_experts = 8, .topk = 2}); });
  expect_error(ErrorCode::argument, "hash_table: null",
               [] { HashTopK<Scoring::sigmoid, Renormalize::no>({.num_experts = 8, .topk = 2, .vocabulary = 4}); });
}

TEST(RoutingErrors, Shapes) {
  AnyRouter const router(config(8, 2));
  std::vector<float> f(64);
  std::vector<std::int32_t> i(64);
  RouteArgs<float> const good{.logits = make_rows<dynamic, float const>(f.data(), 3, 8),
                              .num_valid_rows = 3,
                              .topk_ids = make_rows(i.data(), 3, 2),
                              .topk_weights = make_rows(f.data(), 3, 2)};
  EXPECT_NO_THROW(router.select(good));
  auto bad = good;
  bad.logits = make_rows<dynamic, float const>(f.data(), 3, 7);
  expect_error(ErrorCode::argument, "router_logits: shape [3, 7], expected [3, 8]", [&] { router.select(bad); });
  bad = good;
  bad.num_valid_rows = 4;
  expect_error(ErrorCode::argument, "num_valid_rows: 4 is out of range [0, 3]", [&] { router.select(bad); });
  bad = good;
  bad.topk_ids = make_rows(i.data(), 3, 3);
  expect_error(ErrorCode::argument, "topk_ids: shape [3, 3], expected [3, 2]", [&] { router.select(bad); });
  bad = good;
  bad.topk_weights = make_rows(f.data(), 2, 2);
  expect_error(ErrorCode::argument, "topk_weights: shape [2, 2], expected [3, 2]", [&] { router.select(bad); });
  RouterConfig h = config(16, 3);
  h.selection = Selection::hash_table;
  h.hash_table = kHash.data();
  h.vocabulary = 40;
  bad = good;
  bad.logits = make_rows<dynamic, float const>(f.data(), 3, 16);
  bad.topk_ids = make_rows(i.data(), 3, 3);
  bad.topk_weights = make_rows(f.data(), 3, 3);
  expect_error(ErrorCode::argument, "hash routing needs token ids", [&] { AnyRouter(h).select(bad); });
}

TEST(RouterKind, FirstThatAppliesWins) {
  RouterConfig c = config(16, 2);
  EXPECT_EQ(name(router_kind(c)), "plain top-k");
  c.correction_bias = kBias.data();
  EXPECT_EQ(router_kind(c), RouterKind::bias);
  c.num_expert_group = 1;
  EXPECT_EQ(router_kind(c), RouterKind::bias);  // one group is ungrouped
  c.num_expert_group = 4;
  EXPECT_EQ(router_kind(c), RouterKind::grouped);
  c.num_zero_experts = 2;
  EXPECT_EQ(router_kind(c), RouterKind::zero_expert);
}

}  // namespace
