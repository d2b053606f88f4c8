// SPDX-License-Identifier: Apache-2.0
// tests/gpu/exchange_layer_fused_shared_test.cu: shared experts as further experts of a layer whose experts are divided over ranks (N20),
// on the device: every rank computes those of its own rows, over every window backend, with replicas of routed experts too.
#include <numeric>

#include "moe/eplb/map_tables.hpp"
#include "moe/eplb/maps.hpp"
#include "tests/gpu/layer_ranks.cuh"

namespace {

using namespace moe_test;
constexpr int kFused = 2;
constexpr float kWeight = 0.75F;

/// One step of all ranks, against one rank that takes k + kFused experts of kExperts + kFused for each row.
template <class Rank>
void equals_one_rank(std::vector<std::unique_ptr<Rank>>& ranks, OneRank& alone, unsigned seed) {
  auto const rows = [&](std::size_t r) { return static_cast<std::int64_t>((seed * 5 + r * 7) % (kMost + 1)); };
  for (std::size_t r = 0; r < ranks.size(); ++r) ranks[r]->bring(100 * seed + static_cast<unsigned>(r), kMost);
  for (std::size_t r = 0; r < ranks.size(); ++r) ranks[r]->forward(rows(r));
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    SCOPED_TRACE(text("rank ", r, ", ", rows(r), " rows"));
    std::vector<float> const got = ranks[r]->result(rows(r));
    std::vector<std::int32_t> ids = ranks[r]->topk_ids(rows(r));
    std::vector<float> weights = ranks[r]->topk_weights(rows(r));
    for (std::size_t i = 0; i < ids.size(); ++i) {  // logical ids, the shared experts in the last columns
      int const column = static_cast<int>(i) % (kTopK + kFused) - kTopK;
      if (column < 0) continue;
      ASSERT_EQ(ids[i], kExperts + column);
      ASSERT_EQ(weights[i], kWeight);
    }
    ids.resize(static_cast<std::size_t>(kMost) * (kTopK + kFused), kNoExpert);
    weights.resize(ids.size(), 0.0F);
    alone.bring(100 * seed + static_cast<unsigned>(r), kMost);
    alone.route(ids, weights);
    alone.forward_routed(rows(r));
    EXPECT_LT(relative_error(got, alone.result(rows(r))), 1e-2);
  }
}

template <class Backend>
class FusedRanks {
 public:
  using Rank = LayerRank<Backend>;
  using Params = typename Rank::Layer::Params;
  /// mapping(params, rank): sets the mapping of a rank.
  template <class Mapping>
  FusedRanks(int ranks, ExpertPlacement const& placement, typename Backend::Params const& params, Mapping const& mapping) : comms_(ranks) {
    for (int r = 0; r < ranks; ++r) {
      std::vector<int> experts = experts_of(placement, r);
      for (int i = 0; ranks > 1 && i < kFused; ++i) experts.push_back(kExperts + i);
      Params p{.placement = placement,
               .router = {.num_experts = kExperts, .topk = kTopK, .num_fused_shared = kFused, .fused_shared_weight = kWeight},
               .backend = params};
      mapping(p, r);
      all.push_back(std::make_unique<Rank>(comms_.at(r), experts, p));
    }
  }

 private:
  Comms<typename Backend::Comm> comms_;

 public:
  std::vector<std::unique_ptr<Rank>> all;
};

template <class Backend>
void fused_equals_one_rank(typename Backend::Params const& params = {}) {
  SCOPED_TRACE(Backend::kName);
  OneRank alone(kExperts + kFused, kTopK + kFused);
  auto const none = [](auto&, int) {};
  FusedRanks<Backend> first(1, ExpertPlacement(kExperts + kFused, 1), params, none);  // its kernels are loaded
  equals_one_rank(first.all, alone, 1);
  for (PlacementStrategy strategy : {PlacementStrategy::linear, PlacementStrategy::round_robin}) {
    FusedRanks<Backend> ranks(kRanks, ExpertPlacement(kExperts, kRanks, strategy), params, none);
    for (unsigned seed = 2; seed < 6; ++seed) equals_one_rank(ranks.all, alone, seed);
  }

  // Load balancing moves and counts routed experts only.
  eplb::ExpertMaps const maps = eplb::ExpertMaps::initial(1, kExperts, kRanks);
  eplb::MapTables<Cuda> tables(maps);
  auto const placement = ExpertPlacement::from_physical_to_logical(maps.physical_to_logical().row(0), kExperts, kRanks);
  FusedRanks<Backend> ranks(kRanks, placement, params, [&](auto& p, int rank) {
    p.mapping = tables.mapping(0, rank, kRanks);
    p.load.load_counter = tables.load_counter(0);
  });
  equals_one_rank(ranks.all, alone, 7);
  std::vector<std::int32_t> counts(static_cast<std::size_t>(placement.num_physical()));
  Memory<Cuda>::copy_to_host(counts.data(), tables.load_counter(0), counts.size() * sizeof(std::int32_t));
  std::int64_t rows = 0;
  for (unsigned r = 0; r < kRanks; ++r) rows += (7 * 5 + r * 7) % (kMost + 1);
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}), rows * kTopK);
}

TEST(FusedShared, N20_LowLatency) {
  fused_equals_one_rank<backends::LowLatency<Window>>();
  fused_equals_one_rank<backends::LowLatency<Window>>({.deduplicate = true});
  fused_equals_one_rank<backends::LowLatency<Window>>({.masks = true});
  fused_equals_one_rank<backends::LowLatencyRankMajor<Window>>();
}
TEST(FusedShared, N20_HighThroughput) { fused_equals_one_rank<backends::HighThroughput<Window>>(); }
TEST(FusedShared, N20_OneSided) { fused_equals_one_rank<backends::OneSided<Window>>(); }
TEST(FusedShared, N20_TwoSided) { fused_equals_one_rank<backends::TwoSided<Window>>(); }
TEST(FusedShared, N20_Pplx) { fused_equals_one_rank<backends::Pplx<Window>>(); }

}  // namespace
