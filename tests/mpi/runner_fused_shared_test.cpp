// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_fused_shared_test.cpp: shared experts as further experts of a layer whose experts are divided over ranks (N20): every
// grid and every backend gives what one rank gives with shared experts beside the layer; they leave no rank and are not counted.
// moe-ranks: 1 2 4
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "../gpu/block_file.hpp"
#include "../runner_fused_shared_model.hpp"
#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/backends/window/host/one_sided.hpp"
#include "moe/backends/window/host/pplx.hpp"
#include "moe/backends/window/host/two_sided.hpp"
#include "moe/eplb/map_tables.hpp"
#include "moe/eplb/maps.hpp"
#include "moe/models/fused_shared.hpp"
#include "runner_grid_test/harness.hpp"

namespace {

using namespace moe_test::grid;
using moe_test::expect_error;

struct FusedConfig : HostConfig {
  static constexpr int topk = kTopK + kFused;
};
struct FusedParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Parallel = runner::parallel::Groups<comm::Mpi>;
};
using FusedStore = experts::WeightStore<FusedConfig, quantization::None>;
template <class Backend>
using FusedLayer = ModularKernel<FusedConfig, routing::AnyRouter, quantization::None, Backend, experts::Reference<float>>;

/// The layer's experts without shared ones; those are experts kExperts and kExperts + 1 of the model.
Model const model{.form = {false, false, SharedOutput::none}};
std::vector<float> const gate = bf16_numbers(1, kExperts* kHidden);

/// The rank's routed experts in its local order, then the shared ones.
FusedStore store_of(std::vector<std::int32_t> experts, int tp_rank, int tp_size) {
  for (int i = 0; i < kFused; ++i) experts.push_back(kExperts + i);
  FusedStore out(static_cast<std::int64_t>(experts.size()), kHidden, kIntermediate / tp_size, true);
  for (std::size_t l = 0; l < experts.size(); ++l) {
    out.set_expert(static_cast<std::int64_t>(l), cut13(model.w13(experts[l]), kIntermediate, kHidden, tp_rank, tp_size).data(),
                   cut2(model.w2(experts[l]), kIntermediate, kHidden, tp_rank, tp_size).data());
  }
  return out;
}
std::vector<std::int32_t> experts_of_rank(ExpertPlacement const& placement, int rank) {
  std::vector<std::int32_t> out;
  for (std::int32_t p : placement.local_to_physical(rank)) out.push_back(placement.logical(p));
  return out;
}
template <class R>
typename R::Params fused_params(ExpertPlacement const& placement, int intermediate) {
  typename R::Params p{
      .layer = {.shape = {.hidden = kHidden, .intermediate = intermediate, .num_experts = kExperts + kFused, .topk = kTopK + kFused},
                .max_tokens_per_rank = kMost,
                .placement = placement,
                .router = {.num_experts = kExperts, .topk = kTopK, .num_fused_shared = kFused, .fused_shared_weight = kFusedWeight}}};
  p.gate.weight = make_rows(gate.data(), kExperts, kHidden);
  return p;
}

/// One backend on every grid.
template <class Backend>
class FusedEqualsBeside : public testing::Test {
 public:
  using R = Runner<FusedLayer<Backend>, FusedParts>;
  void TestBody() override {
    int ran = 0;
    for (Grid const& g : grids(world_size())) {
      for (bool sp : {false, true}) {
        BackendFacts facts = Backend::kFacts;
        if (sp && !facts.sequence_parallel) continue;
        facts.sequence_parallel = sp;
        MoeParallel const moe = parallel_of(g, world_rank(), facts);
        if (runner::parallel_conflict(moe) != nullptr) continue;
        SCOPED_TRACE(text("tp ", g.tp, ", dp ", g.dp, ", pcp ", g.pcp, ", ep ", g.ep, ", sp ", sp));
        run(moe);
        ++ran;
      }
    }
    EXPECT_GT(ran, 0);
  }

 private:
  void run(MoeParallel const& moe) {
    bool const alone = moe.ep_size == 1;  // then the shared experts are among those of the placement
    ExpertPlacement const placement(alone ? kExperts + kFused : kExperts, moe.ep_size);
    ExpertPlacement const routed(kExperts, moe.ep_size);
    FusedStore const store = store_of(experts_of_rank(routed, moe.ep_rank), moe.moe_tp_rank, moe.moe_tp_size);
    comm::Mpi* const tp = tp_comm(moe);
    auto p = fused_params<R>(placement, kIntermediate / moe.moe_tp_size);
    p.parallel = {.moe = moe, .tp = tp};
    comm::Self<> self;
    auto const construct = [&]() -> R {
      if constexpr (std::is_same_v<typename Backend::Comm, comm::Mpi>) {
        return R(*layer_comm(moe), store.view(), p);
      } else {
        return R(self, store.view(), p);
      }
    };
    R runner = construct();
    std::vector<float> const x = tokens(moe), want = fused_beside(model, x);
    std::vector<float> out(x.size());
    auto const rows = static_cast<std::int64_t>(x.size()) / kHidden;
    for (int i = 0; i < 2; ++i) {
      runner.forward(make_rows(x.data(), rows, kHidden), make_rows(out.data(), rows, kHidden));
      for (std::size_t at = 0; at < want.size(); ++at) ASSERT_NEAR(out[at], want[at], 2e-5) << "value " << at;
    }
    auto const ids = runner.topk_ids();  // R17: logical ids, the shared experts in the last columns
    for (std::int64_t t = 0; t < ids.extent(0); ++t) {
      for (int i = 0; i < kFused; ++i) ASSERT_EQ(ids(t, kTopK + i), kExperts + i);
    }
  }
};

template <class Backends>
void register_backends(Backends backends) {
  hana::for_each(backends, [](auto type) {
    using Backend = typename decltype(type)::type;
    testing::RegisterTest("FusedShared", text("N20_", Backend::kName).c_str(), nullptr, nullptr, __FILE__, __LINE__,
                          []() -> testing::Test* { return new FusedEqualsBeside<Backend>; });
  });
}
[[maybe_unused]] bool const registered = (register_backends(registry::host_backends), register_backends(registry::window_backends), true);

// Load balancing moves routed experts only: the mapping has none of the shared ones, they are not counted, and the output stays.
TEST(FusedShared, BesideAMappingOfReplicas) {
  using Backend = backends::AllToAllV<comm::Mpi>;
  int const n = world_size();
  if (n == 1) GTEST_SKIP() << "one rank balances nothing";
  using R = Runner<FusedLayer<Backend>, FusedParts>;
  eplb::ExpertMaps const maps = eplb::ExpertMaps::initial(1, kExperts, n);
  eplb::MapTables<space::host> tables(maps);
  MoeParallel const moe = parallel_of({1, n, 1, true}, world_rank(), Backend::kFacts);
  auto const placement = ExpertPlacement::from_physical_to_logical(maps.physical_to_logical().row(0), kExperts, n);
  FusedStore const store = store_of(experts_of_rank(placement, world_rank()), 0, 1);
  auto p = fused_params<R>(placement, kIntermediate);
  p.parallel.moe = moe;
  p.layer.mapping = tables.mapping(0, world_rank(), n);
  p.layer.load.load_counter = tables.load_counter(0);
  R runner(*group({"ep", 0}), store.view(), p);
  std::vector<float> const x = tokens(moe), want = fused_beside(model, x);
  std::vector<float> out(x.size());
  auto const rows = static_cast<std::int64_t>(x.size()) / kHidden;
  runner.forward(make_rows(x.data(), rows, kHidden), make_rows(out.data(), rows, kHidden));
  for (std::size_t at = 0; at < want.size(); ++at) ASSERT_NEAR(out[at], want[at], 2e-5) << "value " << at;
  std::int32_t const* const counts = tables.load_counter(0);
  EXPECT_EQ(std::accumulate(counts, counts + placement.num_physical(), std::int64_t{0}), rows * kTopK);
}

// Blocks of models, each rank with its part of the experts and of the rows, against the output of the models' own code.
TEST(FusedShared, BlocksOfModels) {
  using Block = models::BlockRunner<quantization::None, backends::AllToAllV<comm::Mpi>, experts::Reference<float>>;
  int const n = world_size(), me = world_rank();
  int ran = 0;
  moe_test::each_block_file([&](moe_test::BlockFile const& f) {
    if (f.description.router.num_experts < n) return;
    ExpertPlacement const placement(f.description.router.num_experts, n);
    auto const mine = placement.local_to_physical(me);
    auto weights = io::load_block<float>(f.store, {.experts = std::vector<int>(mine.begin(), mine.end())});
    if (!models::fusing_obstacle(weights).empty()) return;
    ++ran;
    weights = models::with_fused_shared(std::move(weights));
    int const all = f.description.router.num_experts + (n == 1 ? weights.description.router.num_fused_shared : 0);
    Block block(*group({"ep", 0}), std::move(weights), ExpertPlacement(all, n), f.rows());
    std::int64_t const width = f.description.hidden, first = f.rows() * me / n, last = f.rows() * (me + 1) / n;
    auto const part = [&](std::vector<float> const& from) {
      return std::vector<float>(from.begin() + first * width, from.begin() + last * width);
    };
    std::vector<float> const hidden = part(f.hidden), expected = part(f.expected);
    std::vector<float> out(hidden.size());
    block.forward(hidden, f.tokens.empty() ? nullptr : f.tokens.data() + first, out);
    float largest = 0;
    for (float v : f.expected) largest = std::max(largest, std::abs(v));
    for (std::size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected[i], 2e-5F * largest) << "value " << i;
  });
  EXPECT_GE(ran, 2);
}

// A rank with a part of the columns of the shared experts would add it once on every rank that has the row.
TEST(FusedShared, PartsOfSharedExpertsAreRefused) {
  int refused = 0;
  moe_test::each_block_file([&](moe_test::BlockFile const& f) {
    auto const whole = io::load_block<float>(f.store);
    if (!models::fusing_obstacle(whole).empty() || whole.shared.intermediate < 2 * whole.intermediate) return;
    auto const part = io::load_block<float>(f.store, {.shared_tp = std::pair(0, 2)});
    expect_error(ErrorCode::unsupported, "this rank has a part of the shared experts", [&] { models::with_fused_shared(part); });
    ++refused;
  });
  EXPECT_GT(refused, 0);
}

// The second exchange of a dual batch knows the copies, too.
TEST(FusedShared, InTwoHalves) {
  using Backend = backends::AllToAllV<comm::Mpi>;
  struct Parts : FusedParts {
    using DualBatch = runner::dual_batch::Halves;
  };
  using R = Runner<FusedLayer<Backend>, Parts>;
  int const n = world_size();
  if (n == 1) GTEST_SKIP() << "one rank has no copies";
  MoeParallel const moe = parallel_of({1, n, 1, true}, world_rank(), Backend::kFacts);
  ExpertPlacement const placement(kExperts, n);
  FusedStore const store = store_of(experts_of_rank(placement, world_rank()), 0, 1);
  auto p = fused_params<R>(placement, kIntermediate);
  p.parallel.moe = moe;
  R runner(*group({"ep", 0}), store.view(), p);
  runner.decide_dual_batch(true);
  std::vector<float> const x = tokens(moe), want = fused_beside(model, x);
  std::vector<float> out(x.size());
  auto const rows = static_cast<std::int64_t>(x.size()) / kHidden;
  runner.forward(make_rows(x.data(), rows, kHidden), make_rows(out.data(), rows, kHidden));
  for (std::size_t at = 0; at < want.size(); ++at) ASSERT_NEAR(out[at], want[at], 2e-5) << "value " << at;
}

TEST(FusedShared, RanksOutsideThePlacementAreRefused) {
  using Backend = backends::AllGatherReduceScatter<comm::Mpi>;
  int const n = world_size();
  if (n == 1) GTEST_SKIP() << "one rank has all experts";
  ExpertPlacement const placement(kExperts, n);
  FusedStore const store = store_of(experts_of_rank(placement, world_rank()), 0, 1);
  struct Parts : RunnerDefaults {
    using Gate = runner::gate::Linear<float>;
  };
  using R = Runner<FusedLayer<Backend>, Parts>;
  auto p = fused_params<R>(placement, kIntermediate);
  p.layer.same_rows = {n - 1, 2};
  expect_error(ErrorCode::config, text("same_rows: ranks [", n - 1, ", ", n + 1, ") are not among the placement's ", n),
               [&] { R(*group({"ep", 0}), store.view(), p); });
}

}  // namespace
