// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_grid_cases.hpp: what every backend does on every grid of the world's GPUs. runner_grid_test.cpp and
// runner_grid_windows_test.cpp run it with the registry's backends; a backend's facts and the rules say which grids it can serve.
#pragma once

#include <iostream>

#include "../expect_error.hpp"
#include "../runner_fused_shared_model.hpp"
#include "moe/core/contract/facts.hpp"
#include "runner_grid_ranks.hpp"

namespace moe_test::grid {

/// Says how many cases ran and how many the rules refused; a test in which none ran has failed.
template <class Backend>
void report(int ran, int refused) {
  if (world_rank() == 0) std::cout << Backend::kName << ": " << ran << " cases equal one rank, " << refused << " refused\n";
  EXPECT_GT(ran, 0) << Backend::kName;
}

/// Whether the case of these facts differs from the one in which TP ranks keep their rows.
inline bool is_case(Grid const& g, BackendFacts const& facts) { return !facts.sequence_parallel || parallel_of(g, 0, facts).use_sp_moe(); }

/// Every grid; shared experts and reduce_results in every combination, and latent widths and norms. Every other case that runs has
/// rows_agree. Experts that route inside have no zero experts.
template <class Backend, class Experts>
void equals_one_rank() {
  Form const forms[] = {{false, false, SharedOutput::none, true},     {false, false, SharedOutput::none, false},
                        {false, false, SharedOutput::partial, true},  {false, false, SharedOutput::partial, false},
                        {false, false, SharedOutput::complete, true}, {false, false, SharedOutput::complete, false},
                        {false, true, SharedOutput::complete, true},  {true, true, SharedOutput::partial, true},
                        {true, false, SharedOutput::partial, false}};
  int ran = 0, refused = 0;
  for (Grid const& g : grids(world_size())) {
    for (bool sp : {false, true}) {
      BackendFacts facts = Backend::kFacts;
      if (sp && !facts.sequence_parallel) continue;
      facts.sequence_parallel = sp;
      if (!is_case(g, facts)) continue;
      for (Form const& form : forms) {
        SCOPED_TRACE(text("tp ", g.tp, ", dp ", g.dp, ", pcp ", g.pcp, ", ep ", g.ep, ", sp ", sp, ", latent ", form.latent, ", norm ",
                          form.norm, ", shared ", static_cast<int>(form.shared), ", reduce ", form.reduce_results));
        Model const m{.form = form, .zero = facts::routes_inside<Experts>() ? 0 : kZero, .hidden = kWideHidden, .latent = kWideLatent};
        MoeParallel const parallel = parallel_of(g, 0, facts);
        if (runner::parallel_conflict(parallel) != nullptr || (parallel.use_sp_moe() && form.shared == SharedOutput::partial)) {
          expect_error(ErrorCode::config, "", [&] { Rank<Backend, Experts> rank(g, m, false, facts); });
          ++refused;
          continue;
        }
        Rank<Backend, Experts> rank(g, m, ran % 2 == 1, facts);
        std::vector<float> const x = tokens(rank.moe, m.hidden), want = on_one_rank(m, x);
        expect_close(rank.forward(x), want, kTolerance);
        expect_close(rank.forward(x), want, kTolerance);
        if (testing::Test::HasFatalFailure()) return;
        ++ran;
      }
    }
  }
  report<Backend>(ran, refused);
}

template <class Backend>
class RunnerGrid : public testing::Test {};
TYPED_TEST_SUITE_P(RunnerGrid);

TYPED_TEST_P(RunnerGrid, EqualsOneRank) { equals_one_rank<TypeParam, experts::CudaReference>(); }

// Shared experts between the halves of an exchange, and before the layer.
TYPED_TEST_P(RunnerGrid, SharedBesideTheExchangeKeepTheBits) {
  if (TypeParam::kFacts.transport == Transport::local) GTEST_SKIP() << "no exchange";
  for (Grid const& g : {Grid{1, world_size(), 1, true}, Grid{world_size(), 1, 1, true}}) {
    Form const form{false, false, SharedOutput::partial, true};
    Model const beside{.form = form, .hidden = kWideHidden};
    Model before = beside;
    before.form.overlap_shared = false;
    Rank<TypeParam> one(g, beside, false), other(g, before, false);
    std::vector<float> const x = tokens(one.moe, beside.hidden), want = other.forward(x);
    EXPECT_EQ(one.forward(x), want);
    EXPECT_EQ(one.forward(x), want);
  }
}

// 256 columns of the routed path in a layer of 384, in a block of 512. What the padding columns hold must reach no output: the experts'
// weights there are not zero. The second forward finds what the first one left in its memory.
TYPED_TEST_P(RunnerGrid, N8_LatentWithPadding) {
  BackendFacts facts = TypeParam::kFacts;
  facts.sequence_parallel = false;
  Grid g{2, world_size() / 2, 1, true};
  if (runner::parallel_conflict(parallel_of(g, 0, facts)) != nullptr) g = {world_size(), 1, 1, true};  // no exchange
  Model const m{.form = {true, true, SharedOutput::partial}, .hidden = 512, .latent = 256, .padding = 128};
  Rank<TypeParam> rank(g, m, false, facts);
  EXPECT_EQ(rank.runner.layer().shape().hidden(), 384);
  EXPECT_EQ(rank.runner.hidden(), 512);
  std::vector<float> const x = tokens(rank.moe, m.hidden), want = on_one_rank(m, x);
  for (int i = 0; i < 2; ++i) expect_close(rank.forward(x), want, kTolerance);
}

REGISTER_TYPED_TEST_SUITE_P(RunnerGrid, EqualsOneRank, SharedBesideTheExchangeKeepTheBits, N8_LatentWithPadding);

// ---- Shared experts as further experts of the layer (N20): every rank computes those of its own rows.

template <class Backend>
class FusedShared : public testing::Test {
 protected:
  using R = Runner<LayerOf<Backend>, GateParts>;
  void run(MoeParallel const& moe) {
    Model const m{.form = {false, false, SharedOutput::none}, .hidden = kWideHidden};
    bool const alone = moe.ep_size == 1;  // then the shared experts are among those of the placement
    ExpertPlacement const placement(alone ? kExperts + kFused : kExperts, moe.ep_size), routed(kExperts, moe.ep_size);
    int const part = kIntermediate / moe.moe_tp_size;
    std::vector<std::int32_t> mine(routed.local_to_physical(moe.ep_rank).begin(), routed.local_to_physical(moe.ep_rank).end());
    for (int i = 0; i < kFused; ++i) mine.push_back(kExperts + i);
    Store store(static_cast<std::int64_t>(mine.size()), m.hidden, part, true);
    for (std::size_t l = 0; l < mine.size(); ++l) {
      store.set_expert(static_cast<std::int64_t>(l),
                       cut13(m.w13(mine[l]), kIntermediate, m.hidden, moe.moe_tp_rank, moe.moe_tp_size).data(),
                       cut2(m.w2(mine[l]), kIntermediate, m.hidden, moe.moe_tp_rank, moe.moe_tp_size).data());
    }
    typename R::Params p{
        .layer = {.shape = {.hidden = m.hidden, .intermediate = part, .num_experts = kExperts + kFused, .topk = kTopK + kFused},
                  .max_tokens_per_rank = kMost,
                  .placement = placement,
                  .router = {.num_experts = kExperts, .topk = kTopK, .num_fused_shared = kFused, .fused_shared_weight = kFusedWeight}}};
    OnDevice weights;
    p.gate.weight = make_rows(weights.as(p.gate.weight.data_handle(), bf16_numbers(1, kExperts * m.hidden)), kExperts, m.hidden);
    Nccl* const tp = tp_comm(moe);
    p.parallel = {.moe = moe, .tp = tp};
    R runner = with_comm<Backend>(moe, [&](auto& comm) { return R(comm, store.view(), p); });
    CudaStream stream;
    std::vector<float> const x = tokens(moe, m.hidden), want = fused_beside(m, x);
    for (int i = 0; i < 2; ++i) {
      Rowset rows(x, m.hidden);
      runner.forward(rows.x(), rows.y(), {}, stream);
      finish(runner, tp, stream);
      expect_close(rows.result(), want, kTolerance);
    }
    auto const rows_of_rank = static_cast<std::int64_t>(x.size()) / m.hidden;
    std::int64_t const routed_rows = moe.sp_size > 1 ? runner::parallel::slice_of(rows_of_rank, moe).rows : rows_of_rank;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(routed_rows * (kTopK + kFused)));
    if (!ids.empty()) Memory<Cuda>::copy_to_host(ids.data(), runner.topk_ids().data_handle(), ids.size() * sizeof(std::int32_t));
    for (std::size_t i = 0; i < ids.size(); ++i) {  // logical ids, the shared experts in the last columns
      int const column = static_cast<int>(i) % (kTopK + kFused) - kTopK;
      if (column < 0) continue;
      ASSERT_EQ(ids[i], kExperts + column);
    }
  }
};
TYPED_TEST_SUITE_P(FusedShared);

TYPED_TEST_P(FusedShared, N20_EqualsBeside) {
  int ran = 0, refused = 0;
  for (Grid const& g : grids(world_size())) {
    for (bool sp : {false, true}) {
      BackendFacts facts = TypeParam::kFacts;
      if (sp && !facts.sequence_parallel) continue;
      facts.sequence_parallel = sp;
      if (!is_case(g, facts)) continue;
      MoeParallel const moe = parallel_of(g, world_rank(), facts);
      if (runner::parallel_conflict(moe) != nullptr) {
        ++refused;
        continue;
      }
      SCOPED_TRACE(text("tp ", g.tp, ", dp ", g.dp, ", pcp ", g.pcp, ", ep ", g.ep, ", sp ", sp));
      this->run(moe);
      if (testing::Test::HasFatalFailure()) return;
      ++ran;
    }
  }
  report<TypeParam>(ran, refused);
}

REGISTER_TYPED_TEST_SUITE_P(FusedShared, N20_EqualsBeside);

}  // namespace moe_test::grid
