// SPDX-License-Identifier: Apache-2.0
// tests/mpi/layer_refusals_test.cpp: one rank cannot build its layer or block, or cannot make its call: it gets the reason, the others get
// E_PEER at once, and later calls work.
// moe-ranks: 1 2 3
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

#include "../expect_error.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/routing/custom.hpp"
#include "moe/routing/external.hpp"
#include "registry_blocks.hpp"
#include "registry_layers.hpp"

namespace {

using namespace moe;
using namespace moe_test;

using Naive = backends::Naive<comm::Mpi>;
using Batched = backends::LowLatency<comm::MpiShared>;

struct Invariant : RegistryConfig {
  static constexpr bool batch_invariant = true;
};

/// Experts whose weights are 0.
template <class Config, class Quant>
experts::WeightStore<Config, Quant> zeros(std::int64_t experts, std::int64_t hidden, std::int64_t intermediate, bool gated,
                                          Quant const& quant = {}) {
  experts::WeightStore<Config, Quant> out(experts, hidden, intermediate, gated, quant);
  std::vector<float> const zero(static_cast<std::size_t>(2 * hidden * intermediate));
  for (std::int64_t e = 0; e < experts; ++e) out.set_expert(e, zero.data(), zero.data());
  return out;
}

/// The last rank fails.
template <class Backend>
class Refusals : public testing::Test {
 protected:
  bool errs() const { return mpi.rank() == mpi.size() - 1; }
  /// The failing rank throws its own error, the others E_PEER.
  template <class Call>
  void expect_refusal(ErrorCode own, std::string_view part, Call&& call) const {
    if (errs()) {
      expect_error(own, part, call);
    } else {
      expect_error(ErrorCode::peer, text("rank ", mpi.size() - 1), call);
    }
  }
  comm::Mpi mpi{MPI_COMM_WORLD, {.timeout_ms = 20'000}};
};
using Backends = testing::Types<Naive, Batched>;
TYPED_TEST_SUITE(Refusals, Backends);

TYPED_TEST(Refusals, ConstructionOfALayer) {
  using Layer = RegistryLayer<None, TypeParam, experts::OneDnn>;
  int const num_experts = 4 * this->mpi.size();
  auto const store = zeros<RegistryConfig, None>(4, kHidden, kIntermediate, true);
  auto const few = zeros<RegistryConfig, None>(3, kHidden, kIntermediate, true);
  auto const narrow = zeros<RegistryConfig, None>(4, kHidden / 2, kIntermediate, true);
  typename Layer::Params const good{.shape = {kHidden, kIntermediate, num_experts, 2},
                                    .max_tokens_per_rank = 4,
                                    .placement = ExpertPlacement(num_experts, this->mpi.size()),
                                    .router = {.num_experts = num_experts, .topk = 2}};
  auto with = [&](auto&& change) {
    auto p = good;
    if (this->errs()) change(p);
    return p;
  };
  auto refuses = [&](ErrorCode code, std::string_view part, typename Layer::Params const& p, auto const& weights) {
    this->expect_refusal(code, part, [&] { Layer layer(this->mpi, weights.view(), p); });
  };
  refuses(ErrorCode::config, "intermediate: 0 is out of range [1, 16777216]", with([](auto& p) { p.shape.intermediate = 0; }), store);
  refuses(ErrorCode::config, "top_k: 99", with([](auto& p) { p.router.topk = 99; }), store);
  refuses(ErrorCode::config, "the layer has 2", with([](auto& p) { p.router.topk = 1; }), store);
  refuses(ErrorCode::argument, "expert weights: 3 experts", good, this->errs() ? few : store);
  refuses(ErrorCode::argument, "expert weights: w13 columns", good, this->errs() ? narrow : store);  // the experts, after the exchange
  std::vector<float> const x(kHidden, 1.0F);
  std::vector<float> const logits(static_cast<std::size_t>(num_experts), 0.0F);
  std::vector<float> y(kHidden);
  Layer layer(this->mpi, store.view(), good);
  layer.forward(make_rows(x.data(), 1, kHidden), make_rows(logits.data(), 1, num_experts), make_rows(y.data(), 1, kHidden));
}

// Settings that affect a token's result are equal on all ranks, or every rank is told which one differs.
TYPED_TEST(Refusals, LayersThatDiffer) {
  using Layer = RegistryLayer<None, TypeParam, experts::OneDnn>;
  int const num_experts = 4 * this->mpi.size();
  auto const store = zeros<RegistryConfig, None>(4, kHidden, kIntermediate, true);
  auto const narrow = zeros<RegistryConfig, None>(4, kHidden, kIntermediate / 2, true);
  auto build = [&](auto&& change, bool other_weights = false) {
    typename Layer::Params p{.shape = {kHidden, kIntermediate, num_experts, 1},
                             .max_tokens_per_rank = 4,
                             .placement = ExpertPlacement(num_experts, this->mpi.size()),
                             .router = {.num_experts = num_experts, .topk = 1}};
    if (this->errs()) change(p);
    Layer layer(this->mpi, (this->errs() && other_weights ? narrow : store).view(), p);
  };
  auto differs = [&](std::string_view field, std::string_view ours, std::string_view theirs, auto&& change, bool other_weights = false) {
    if (this->mpi.size() == 1) return;
    expect_error(ErrorCode::mismatch,
                 text("ranks disagree about ", field, ": rank 0 has ", ours, ", rank ", this->mpi.size() - 1, " has ", theirs),
                 [&] { build(change, other_weights); });
  };
  differs("weight_on_input", "0", "1", [](auto& p) { p.shape.weight_on_input = true; });
  differs("intermediate", text(kIntermediate), text(kIntermediate / 2), [](auto& p) { p.shape.intermediate = kIntermediate / 2; }, true);
  differs("scoring", "softmax", "sigmoid", [](auto& p) { p.router.scoring = routing::Scoring::sigmoid; });
  differs("routed_scaling_factor", "1", "1.00000012", [](auto& p) { p.router.routed_scaling_factor = 1.00000012F; });
  differs("placement of physical expert 1", "rank 0, its expert 1, a replica of 1", "rank 1, its expert 0, a replica of 1",
          [&](auto& p) { p.placement = ExpertPlacement(num_experts, this->mpi.size(), PlacementStrategy::round_robin, true); });
  build([](auto&) {});
}

// Q16: a scale from the checkpoint affects how every rank decodes the rows that it receives.
TYPED_TEST(Refusals, Q16_StaticScalesThatDiffer) {
  if (this->mpi.size() == 1) return;
  int const num_experts = 4 * this->mpi.size();
  auto build = [&]<class Quant>(Quant const& quant) {
    using Layer = RegistryLayer<Quant, TypeParam, experts::OneDnn>;
    auto const store = zeros<RegistryConfig, Quant>(4, kHidden, kIntermediate, true, quant);
    Layer layer(this->mpi, store.view(),
                {.shape = {kHidden, kIntermediate, num_experts, 1},
                 .max_tokens_per_rank = 4,
                 .placement = ExpertPlacement(num_experts, this->mpi.size()),
                 .router = {.num_experts = num_experts, .topk = 1},
                 .quantization = quant});
  };
  auto differs = [&](std::string_view field) {
    return text("ranks disagree about ", field, ": rank 0 has 0.5, rank ", this->mpi.size() - 1, " has 0.25");
  };
  float const scale = this->errs() ? 0.25F : 0.5F;
  expect_error(ErrorCode::mismatch, differs("static activation scale"), [&] { build(quantization::Fp8PerTensorStatic({.scale = scale})); });
  expect_error(ErrorCode::mismatch, differs("activation global_scale"), [&] { build(quantization::Nvfp4({.global_scale = scale})); });
  build(quantization::Fp8PerTensorStatic({.scale = 0.5F}));
}

// Which replica a token goes to depends on its position in the batch, and so do the sums of a rank that adds outputs.
TYPED_TEST(Refusals, BatchInvarianceWithReplicas) {
  using Layer = ModularKernel<Invariant, routing::AnyRouter, None, TypeParam, experts::Reference<float>>;
  std::vector<std::int32_t> slots;
  for (int r = 0; r < this->mpi.size(); ++r) slots.push_back(r);  // expert 0 is everywhere
  int const P = this->mpi.size();
  std::vector<std::int32_t> const owners(static_cast<std::size_t>(P), 0);
  std::int32_t const count = P;
  auto const store = zeros<Invariant, None>(1, kHidden, kIntermediate, true);
  auto build = [&] {
    typename Layer::Params p{.shape = {kHidden, kIntermediate, 1, 1},
                             .max_tokens_per_rank = 4,
                             .placement = ExpertPlacement::from_physical_to_logical(owners, 1, P),
                             .router = {.num_experts = 1, .topk = 1}};
    p.mapping = {.num_experts = 1,
                 .num_physical = P,
                 .max_replicas = P,
                 .logical_to_physical = slots.data(),
                 .replica_count = &count,
                 .source_rank = this->mpi.rank(),
                 .ep_size = P};
    Layer layer(this->mpi, store.view(), p);
  };
  if (P == 1 || TypeParam::kReduction == TopKReduction::backend) {
    build();
  } else {
    expect_error(ErrorCode::config, "batch_invariant: ", build);
  }
}

TYPED_TEST(Refusals, LogitsThatAreNotRows) {
  using Layer = RegistryLayer<None, TypeParam, experts::OneDnn>;
  int const num_experts = 4 * this->mpi.size();
  auto const store = zeros<RegistryConfig, None>(4, kHidden, kIntermediate, true);
  Layer layer(this->mpi, store.view(),
              {.shape = {kHidden, kIntermediate, num_experts, 2},
               .max_tokens_per_rank = 4,
               .placement = ExpertPlacement(num_experts, this->mpi.size()),
               .router = {.num_experts = num_experts, .topk = 2}});
  std::vector<float> const x(2 * kHidden, 1.0F);
  std::vector<float> const logits(2 * static_cast<std::size_t>(num_experts), 0.0F);
  std::vector<float> y(2 * kHidden);
  auto forward = [&](float const* data, std::int64_t stride) {
    layer.forward(make_rows(x.data(), 2, kHidden), make_strided_rows(data, 2, num_experts, stride), make_rows(y.data(), 2, kHidden));
  };
  auto refuses = [&](std::string_view part, float const* data, std::int64_t stride) {
    this->expect_refusal(ErrorCode::argument, part, [&] { this->errs() ? forward(data, stride) : forward(logits.data(), num_experts); });
  };
  refuses("router_logits: null pointer for 2 rows", nullptr, num_experts);
  refuses("router_logits: row stride 1 is less than the width", logits.data(), 1);
  forward(logits.data(), num_experts);
}

// One rank's caller gives an id that names no expert: that rank gets the slot and the bound.
TYPED_TEST(Refusals, RoutingOfTheCallerThatNamesNoExpert) {
  using Layer = ModularKernel<RegistryConfig, routing::External, None, TypeParam, experts::OneDnn>;
  int const num_experts = 4 * this->mpi.size();
  auto const store = zeros<RegistryConfig, None>(4, kHidden, kIntermediate, true);
  Layer layer(this->mpi, store.view(),
              {.shape = {kHidden, kIntermediate, num_experts, 2},
               .max_tokens_per_rank = 4,
               .placement = ExpertPlacement(num_experts, this->mpi.size()),
               .router = {.num_experts = num_experts, .topk = 2}});
  std::vector<float> const x(2 * kHidden, 1.0F);
  std::vector<std::int32_t> ids = {0, num_experts - 1, -1, 1};
  std::vector<float> const weights(4, 0.5F);
  std::vector<float> y(2 * kHidden);
  auto forward = [&] {
    layer.forward_routed(make_rows(x.data(), 2, kHidden), make_rows(ids.data(), 2, 2), make_rows(weights.data(), 2, 2),
                         make_rows(y.data(), 2, kHidden));
  };
  auto refuses = [&](std::int32_t wrong, std::string const& part) {
    std::int32_t const right = std::exchange(ids[3], this->errs() ? wrong : ids[3]);
    this->expect_refusal(ErrorCode::argument, part, forward);
    ids[3] = right;
  };
  refuses(num_experts, text("topk_ids[1, 1]: ", num_experts, " is out of range [-1, ", num_experts, ")"));
  refuses(-2, text("topk_ids[1, 1]: -2 is out of range [-1, ", num_experts, ")"));
  forward();
}

TYPED_TEST(Refusals, RoutingThatThrows) {
  bool fail = this->errs();
  auto route = [&fail](auto const&, int, bool, Rows<std::int32_t> ids, Rows<float> weights) {
    if (fail) throw std::runtime_error("no routing today");
    ids(0, 0) = 0;
    weights(0, 0) = 1.0F;
  };
  using Layer = ModularKernel<RegistryConfig, routing::CustomRouter<decltype(route)>, None, TypeParam, experts::OneDnn>;
  int const num_experts = this->mpi.size();
  auto const store = zeros<RegistryConfig, None>(1, kHidden, kIntermediate, true);
  Layer layer(this->mpi, store.view(),
              {.shape = {kHidden, kIntermediate, num_experts, 1},
               .max_tokens_per_rank = 1,
               .placement = ExpertPlacement(num_experts, this->mpi.size()),
               .router = {.num_experts = num_experts, .topk = 1, .function = route}});
  std::vector<float> const x(kHidden, 1.0F);
  std::vector<float> const logits(static_cast<std::size_t>(num_experts), 0.0F);
  std::vector<float> y(kHidden);
  auto forward = [&] {
    layer.forward(make_rows(x.data(), 1, kHidden), make_rows(logits.data(), 1, num_experts), make_rows(y.data(), 1, kHidden));
  };
  if (this->errs()) {
    EXPECT_THROW(forward(), std::runtime_error);
  } else {
    expect_error(ErrorCode::peer, text("rank ", this->mpi.size() - 1), forward);
  }
  fail = false;
  forward();
}

TYPED_TEST(Refusals, SizesOfABlock) {
  using Block = models::BlockRunner<None, TypeParam, experts::OneDnn>;
  std::vector<Source> const all = sources();
  auto const source = std::find_if(all.begin(), all.end(), [](Source const& s) { return s.name.starts_with("mixtral"); });
  ASSERT_NE(source, all.end());
  io::TensorStore const store(source->weights);
  io::LayerDescription const d = io::from_block_metadata(store.metadata(), store.label());
  ExpertPlacement const placement(d.router.num_experts, this->mpi.size());
  auto const mine = placement.local_to_physical(this->mpi.rank());
  io::LoadOptions load;
  load.experts = std::vector<int>(mine.begin(), mine.end());
  auto weights = [&] { return io::LayerLoader::from_block(store, d).template load<float>(load); };
  this->expect_refusal(ErrorCode::argument, "expert weights: ", [&] {
    auto w = weights();
    if (this->errs()) w.experts.pop_back();
    Block block(this->mpi, std::move(w), placement, 4);
  });

  Block block(this->mpi, weights(), placement, 4);
  auto const h = static_cast<std::size_t>(d.hidden);
  std::vector<float> const x(6 * h, 0.1F);
  std::vector<float> y(6 * h, -1.0F);
  auto forward = [&](std::size_t in, std::size_t out) { block.forward(std::span(x).first(in), nullptr, std::span(y).first(out)); };
  auto refuses = [&](ErrorCode code, std::string_view part, std::size_t in, std::size_t out) {
    this->expect_refusal(code, part, [&] { this->errs() ? forward(in, out) : forward(2 * h, 2 * h); });
    EXPECT_TRUE(!this->errs() || y[0] == -1.0F) << part;
  };
  refuses(ErrorCode::argument, text("hidden_states: ", 2 * h - 1, " values are not a multiple"), 2 * h - 1, 2 * h - 1);
  refuses(ErrorCode::capacity, "hidden_states: 5 rows exceed max_tokens_per_rank 4", 5 * h, 5 * h);
  refuses(ErrorCode::argument, text("output: ", h, " values, expected ", 2 * h), 2 * h, h);
  forward(2 * h, 2 * h);
  EXPECT_NE(y[0], -1.0F);
}

}  // namespace
