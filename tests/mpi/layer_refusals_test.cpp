// SPDX-License-Identifier: Apache-2.0
// tests/mpi/layer_refusals_test.cpp: one rank cannot build its layer or block, or cannot make its call: it says why, the others get E_PEER
// at once, and what follows works.
// moe-ranks: 1 2 3
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "../expect_error.hpp"
#include "moe/backends/low_latency_host.hpp"
#include "moe/routing/custom.hpp"
#include "registry_blocks.hpp"
#include "registry_layers.hpp"

namespace {

using namespace moe;
using namespace moe_test;

using Naive = backends::Naive<comm::Mpi>;
using Batched = backends::LowLatency<comm::MpiShared>;

/// The last rank errs.
template <class Backend>
class Refusals : public testing::Test {
 protected:
  bool errs() const { return mpi.rank() == mpi.size() - 1; }
  /// What the rank that errs throws, and E_PEER on the others.
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
  experts::WeightStore<RegistryConfig, None> const store(4, kHidden, kIntermediate, true);
  experts::WeightStore<RegistryConfig, None> const few(3, kHidden, kIntermediate, true);
  experts::WeightStore<RegistryConfig, None> const narrow(4, kHidden / 2, kIntermediate, true);
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
  refuses(ErrorCode::config, "intermediate: 0 must be at least 1", with([](auto& p) { p.shape.intermediate = 0; }), store);
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

TYPED_TEST(Refusals, RoutingThatThrows) {
  bool fail = this->errs();
  auto route = [&fail](auto const&, int, bool, Rows<std::int32_t> ids, Rows<float> weights) {
    if (fail) throw std::runtime_error("no routing today");
    ids(0, 0) = 0;
    weights(0, 0) = 1.0F;
  };
  using Layer = ModularKernel<RegistryConfig, routing::CustomRouter<decltype(route)>, None, TypeParam, experts::OneDnn>;
  int const num_experts = this->mpi.size();
  experts::WeightStore<RegistryConfig, None> const store(1, kHidden, kIntermediate, true);
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
  using Block = models::Block<None, TypeParam, experts::OneDnn>;
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
