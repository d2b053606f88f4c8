// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_monolithic_test.cpp: experts that route inside (N16): on every grid that gathers rows or holds them everywhere they give
// what experts with routed rows give; what needs routing outside is refused.
// moe-ranks: 1 2 4
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "moe/experts/monolithic.hpp"
#include "moe/routing/custom.hpp"
#include "moe/routing/external.hpp"
#include "moe/routing/softmax_topk.hpp"
#include "runner_grid_test/harness.hpp"

namespace {

using namespace moe_test::grid;
using moe_test::expect_error;
using Inside = experts::Monolithic<experts::Reference<float>>;

template <class Backend, class Experts>
using LayerOf = ModularKernel<HostConfig, routing::AnyRouter, quantization::None, Backend, Experts>;
struct Parts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Shared = runner::shared::Separate<experts::Reference<float>>;
  using Parallel = runner::parallel::Groups<comm::Mpi>;
};
struct ChunkParts : Parts {
  using Chunking = runner::chunking::Lockstep;
};

Model const model{.form = {false, false, SharedOutput::complete}};
std::vector<float> const gate = bf16_numbers(1, kExperts* kHidden);

/// The routers whose choice differs in kind.
std::vector<routing::RouterConfig> routers() {
  std::vector<float> static const bias = bf16_numbers(3, kExperts);
  routing::RouterConfig plain{.num_experts = kExperts, .topk = kTopK};
  routing::RouterConfig grouped = plain;
  grouped.scoring = routing::Scoring::sigmoid;
  grouped.num_expert_group = 4;
  grouped.topk_group = 2;
  grouped.correction_bias = bias.data();
  grouped.renorm = routing::Renorm::sum;
  grouped.routed_scaling_factor = 2.5F;
  return {plain, grouped};
}

template <class R>
typename R::Params params_of(MoeParallel const& moe, routing::RouterConfig const& router, std::int64_t capacity = kMost) {
  typename R::Params p{
      .layer = {.shape = {.hidden = kHidden, .intermediate = kIntermediate / moe.moe_tp_size, .num_experts = kExperts, .topk = kTopK},
                .max_tokens_per_rank = capacity,
                .placement = ExpertPlacement(kExperts, moe.ep_size),
                .router = router}};
  p.gate.weight = make_rows(gate.data(), kExperts, kHidden);
  p.shared.count = 1;
  p.shared.intermediate = kShared;
  auto& w = p.shared.weights;
  w.w13 = {
      make_blocks(model.shared13.data(), 1, 2 * kShared, kHidden), make_rows(w.w13.scales.data_handle(), 1, 0), {}, 2 * kShared, kHidden};
  w.w2 = {make_blocks(model.shared2.data(), 1, kHidden, kShared), make_rows(w.w2.scales.data_handle(), 1, 0), {}, kHidden, kShared};
  p.parallel = {.moe = moe, .tp = tp_comm(moe)};
  return p;
}

template <class Backend, class Experts, class P>
std::vector<float> forward(MoeParallel const& moe, routing::RouterConfig const& router, std::int64_t capacity = kMost) {
  using R = Runner<LayerOf<Backend, Experts>, P>;
  static_assert(R::is_monolithic() == std::is_same_v<Experts, Inside>);
  ExpertPlacement const placement(kExperts, moe.ep_size);
  HostStore const store = experts_of<HostStore>(model, placement, moe.ep_rank, moe.moe_tp_rank, moe.moe_tp_size);
  comm::Self<> self;
  auto const run = [&](auto& comm) {
    R runner(comm, store.view(), params_of<R>(moe, router, capacity));
    std::vector<float> const x = tokens(moe);
    std::vector<float> out(x.size(), std::numeric_limits<float>::quiet_NaN());
    auto const rows = static_cast<std::int64_t>(x.size()) / kHidden;
    for (int i = 0; i < 2; ++i) runner.forward(make_rows(x.data(), rows, kHidden), make_rows(out.data(), rows, kHidden));
    return out;
  };
  if constexpr (std::is_same_v<typename Backend::Comm, comm::Mpi>) {
    return run(*layer_comm(moe));
  } else {
    return run(self);
  }
}

template <class Backend>
class Monolithic : public testing::Test {};
using Backends = testing::Types<backends::NoExpertParallel<>, backends::Naive<comm::Mpi>, backends::AllGatherReduceScatter<comm::Mpi>>;
TYPED_TEST_SUITE(Monolithic, Backends);

// The same weights, router and grid. Both sum a row's chosen experts in the order of the choice, so the bits are the same.
TYPED_TEST(Monolithic, N16_EqualsRoutedRows) {
  using Routed = experts::Reference<float>;
  int ran = 0;
  for (Grid const& g : grids(world_size())) {
    for (bool sp : {false, true}) {
      BackendFacts facts = TypeParam::kFacts;
      if (sp && !facts.sequence_parallel) continue;
      facts.sequence_parallel = sp;
      MoeParallel const moe = parallel_of(g, world_rank(), facts);
      if (runner::parallel_conflict(moe) != nullptr) continue;
      SCOPED_TRACE(text("tp ", g.tp, ", dp ", g.dp, ", pcp ", g.pcp, ", ep ", g.ep, ", sp ", sp));
      for (routing::RouterConfig const& router : routers()) {
        std::vector<float> const want = forward<TypeParam, Routed, Parts>(moe, router);
        EXPECT_EQ((forward<TypeParam, Inside, Parts>(moe, router)), want);
        // Chunks of two rows, in lockstep: ranks whose rows are used up still gather.
        EXPECT_EQ((forward<TypeParam, Inside, ChunkParts>(moe, router, 2)), want);
      }
      ++ran;
    }
  }
  EXPECT_GT(ran, 0);
}

using OneLayer = LayerOf<backends::NoExpertParallel<>, Inside>;
template <class L = OneLayer>
typename L::Params one_rank() {
  return {.shape = {.hidden = kHidden, .intermediate = kIntermediate, .num_experts = kExperts, .topk = kTopK},
          .max_tokens_per_rank = kMost,
          .placement = ExpertPlacement(kExperts, 1),
          .router = {.num_experts = kExperts, .topk = kTopK}};
}

// Padding rows have no expert, whatever their logits are; bf16 logits choose as their values do; the layer shows what it passed on.
TEST(MonolithicLayer, N16_PaddingAndLogitsOfAnotherType) {
  HostStore const store = experts_of<HostStore>(model, ExpertPlacement(kExperts, 1), 0, 0, 1);
  comm::Self<> self;
  OneLayer inside(self, store.view(), one_rank());
  using Routed = LayerOf<backends::NoExpertParallel<>, experts::Reference<float>>;
  Routed outside(self, store.view(), one_rank<Routed>());
  std::vector<float> const x = bf16_numbers(8, kMost * kHidden);
  std::vector<float> logits = bf16_numbers(9, kMost * kExperts), got(x.size()), want(x.size());
  std::vector<bf16> coded;
  for (float v : logits) coded.push_back(from_float<bf16>(v));
  for (std::int64_t valid : {0, 4, 7}) {
    for (std::size_t i = static_cast<std::size_t>(valid * kExperts); i < logits.size(); ++i) logits[i] = std::nanf("");
    auto const run = [&](auto& layer, auto const& z, std::vector<float>& out) {
      layer.forward(make_rows(x.data(), kMost, kHidden), make_rows(z.data(), kMost, kExperts), make_rows(out.data(), kMost, kHidden),
                    {.num_valid_rows = valid});
    };
    run(outside, coded, want);
    run(inside, coded, got);
    EXPECT_EQ(got, want);
    run(inside, logits, got);
    EXPECT_EQ(got, want) << "the logits are bf16 values";
    for (std::size_t i = 0; i < logits.size(); ++i) logits[i] = to_float(coded[i]);
    EXPECT_EQ(inside.topk_ids().extent(1), kExperts);
    for (int j = 0; valid > 0 && j < kExperts; ++j) EXPECT_EQ(inside.topk_ids()(0, j), j);
  }
  EXPECT_EQ(outside.topk_ids().extent(1), kTopK);
}

TEST(MonolithicLayer, WhatNeedsRoutingOutsideIsRefused) {
  HostStore const store = experts_of<HostStore>(model, ExpertPlacement(kExperts, 1), 0, 0, 1);
  comm::Self<> self;
  auto const refuses = [&](std::string const& what, auto const& change) {
    auto p = one_rank();
    change(p);
    expect_error(ErrorCode::config, "monolithic kernel without " + what, [&] { OneLayer layer(self, store.view(), p); });
  };
  std::vector<std::int32_t> slots(kExperts), ones(kExperts, 1), counted(kExperts);
  refuses("EPLB", [&](auto& p) {
    p.mapping = {.num_experts = kExperts, .num_physical = kExperts, .max_replicas = 1};
    p.mapping.logical_to_physical = slots.data();
    p.mapping.replica_count = ones.data();
  });
  refuses("EPLB", [&](auto& p) { p.load.load_counter = counted.data(); });
  refuses("zero experts", [](auto& p) { p.router.num_zero_experts = 2; });
  refuses("weights of shared experts", [](auto& p) {
    p.router.scoring = routing::Scoring::sigmoid;
    p.router.num_joint_shared = 1;
  });
  struct AnyTopK : LayerDefaults {
    using Activation = activation::Silu;
  };
  using Wider = ModularKernel<AnyTopK, routing::AnyRouter, quantization::None, backends::NoExpertParallel<>, Inside>;
  auto fused = one_rank<Wider>();
  fused.router.num_fused_shared = 1;
  fused.shape.num_experts = kExperts + 1;
  fused.shape.topk = kTopK + 1;
  fused.placement = ExpertPlacement(kExperts + 1, 1);
  expect_error(ErrorCode::config, "monolithic kernel without fused shared experts", [&] { Wider layer(self, store.view(), fused); });

  using None = quantization::None;
  auto const reason = []<class Router, class Backend>(Router*, Backend*) {
    return std::string(Composition<HostConfig, Router, None, Backend, Inside>::reason() == nullptr
                           ? ""
                           : Composition<HostConfig, Router, None, Backend, Inside>::reason());
  };
  routing::SoftmaxTopK<routing::Renormalize::yes>* const softmax = nullptr;
  routing::External* const external = nullptr;
  backends::NoExpertParallel<>* const local = nullptr;
  backends::AllToAllV<comm::Mpi>* const all_to_all = nullptr;
  EXPECT_EQ(reason(softmax, local), "");
  EXPECT_NE(reason(softmax, all_to_all).find("the backend sends rows to the ranks of their experts"), std::string::npos);
  EXPECT_NE(reason(external, local).find("have no path for this router"), std::string::npos);
}

}  // namespace
