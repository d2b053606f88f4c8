// SPDX-License-Identifier: Apache-2.0
// tests/unit/parallel_config_test.cpp: grid, groups, flattening, every validation rule, fingerprint (cases P1-P3, P7-P9, P13, P17).
#include "moe/parallel/validation.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "expect_error.hpp"
#include "moe/models/registry.hpp"
#include "moe/parallel/config.hpp"

namespace {

using moe::ErrorCode;
using moe::GroupKind;
using moe::MoeParallel;
using moe::ParallelConfig;
using moe_test::expect_error;
using Ranks = std::vector<int>;

MoeParallel flat(int tp, int dp, int pcp, int tp_rank, int dp_rank, int pcp_rank, bool ep) {
  return moe::flatten({.tp_size = tp,
                       .tp_rank = tp_rank,
                       .pcp_size = pcp,
                       .pcp_rank = pcp_rank,
                       .dp_size = dp,
                       .dp_rank = dp_rank,
                       .enable_expert_parallel = ep});
}

TEST(ParallelConfig, P1_FlatteningTableAllRanks) {
  struct Row {
    int tp, dp, pcp, flat;
  };
  for (Row row : {Row{1, 1, 1, 1}, Row{2, 1, 1, 2}, Row{1, 2, 1, 2}, Row{2, 2, 1, 4}, Row{4, 1, 1, 4}, Row{2, 1, 2, 4}, Row{8, 4, 1, 32}}) {
    int expected = 0;
    for (int dp = 0; dp < row.dp; ++dp) {
      for (int pcp = 0; pcp < row.pcp; ++pcp) {
        for (int tp = 0; tp < row.tp; ++tp, ++expected) {
          MoeParallel const off = flat(row.tp, row.dp, row.pcp, tp, dp, pcp, false);
          EXPECT_FALSE(off.use_ep);
          EXPECT_EQ(off.flat_size, row.flat);
          EXPECT_EQ(off.moe_tp_size, row.flat);
          EXPECT_EQ(off.moe_tp_rank, expected);
          EXPECT_EQ(off.ep_size, 1);
          EXPECT_EQ(off.ep_rank, 0);
          MoeParallel const on = flat(row.tp, row.dp, row.pcp, tp, dp, pcp, true);
          EXPECT_EQ(on.use_ep, row.flat > 1);
          EXPECT_EQ(on.moe_tp_size, 1);
          EXPECT_EQ(on.moe_tp_rank, 0);
          EXPECT_EQ(on.ep_size, row.flat);
          EXPECT_EQ(on.ep_rank, expected);
          EXPECT_EQ(on.tp_size, row.tp);
          EXPECT_EQ(on.dp_rank, dp);
          EXPECT_EQ(on.pcp_rank, pcp);
        }
      }
    }
    EXPECT_EQ(expected, row.flat);
  }
}

TEST(ParallelConfig, P2_FlatRankOrder) {
  EXPECT_EQ(flat(2, 2, 1, 0, 0, 0, true).flat_rank, 0);
  EXPECT_EQ(flat(2, 2, 1, 1, 0, 0, true).flat_rank, 1);
  EXPECT_EQ(flat(2, 2, 1, 0, 1, 0, true).flat_rank, 2);
  EXPECT_EQ(flat(2, 2, 1, 1, 1, 0, true).flat_rank, 3);
  EXPECT_EQ(flat(2, 1, 2, 0, 0, 0, true).flat_rank, 0);
  EXPECT_EQ(flat(2, 1, 2, 1, 0, 0, true).flat_rank, 1);
  EXPECT_EQ(flat(2, 1, 2, 0, 0, 1, true).flat_rank, 2);
  EXPECT_EQ(flat(2, 1, 2, 1, 0, 1, true).flat_rank, 3);
}

TEST(ParallelConfig, P3_FlagWithOneRankHasNoEffect) {
  MoeParallel const one = flat(1, 1, 1, 0, 0, 0, true);
  EXPECT_FALSE(one.use_ep);
  EXPECT_EQ(one.ep_size, 1);
  EXPECT_FALSE(one.use_all2all());
  EXPECT_FALSE(one.needs_dispatch());
}

TEST(ParallelConfig, DerivedFlags) {
  auto const with = [](int tp, int dp, bool ep, std::string_view backend) {
    return moe::flatten({.tp_size = tp, .dp_size = dp, .enable_expert_parallel = ep, .backend = moe::registry::backend_facts(backend)});
  };
  MoeParallel const tp_only = with(4, 1, true, "low_latency");
  EXPECT_FALSE(tp_only.use_all2all());
  EXPECT_FALSE(tp_only.needs_dispatch());
  EXPECT_FALSE(tp_only.use_sp_moe());
  EXPECT_FALSE(tp_only.batched_format());
  EXPECT_EQ(tp_only.num_dispatchers(), 4);

  MoeParallel const dp_no_ep = with(1, 2, false, "allgather_reduce_scatter");
  EXPECT_FALSE(dp_no_ep.use_all2all());
  EXPECT_TRUE(dp_no_ep.needs_dispatch());

  for (std::string_view backend : {"allgather_reduce_scatter", "high_throughput", "low_latency", "all_to_all_v", "one_sided"}) {
    MoeParallel const both = with(2, 4, true, backend);
    EXPECT_TRUE(both.use_sp_moe()) << backend;
    EXPECT_EQ(both.sp_size, 2);
    EXPECT_EQ(both.num_dispatchers(), 8);
    EXPECT_FALSE(with(2, 4, false, backend).use_sp_moe());
    EXPECT_FALSE(with(1, 4, true, backend).use_sp_moe());
    EXPECT_FALSE(with(2, 1, true, backend).use_sp_moe());
  }
  MoeParallel const pplx = with(2, 4, true, "pplx");
  EXPECT_FALSE(pplx.use_sp_moe());
  EXPECT_TRUE(pplx.batched_format());
  EXPECT_EQ(pplx.num_dispatchers(), 4) << "one lane of each TP pair sends";
  EXPECT_TRUE(with(2, 4, true, "low_latency").batched_format());
  EXPECT_FALSE(with(2, 4, true, "naive").use_sp_moe());
}

TEST(ParallelConfig, P17_ExplicitSizes) {
  std::vector<std::pair<int, int>> seen;
  for (int tp_rank = 0; tp_rank < 4; ++tp_rank) {
    MoeParallel const m = moe::flatten({.tp_size = 4, .tp_rank = tp_rank, .moe_ep_size = 2, .moe_tp_size = 2});
    EXPECT_EQ(m.ep_size, 2);
    EXPECT_EQ(m.moe_tp_size, 2);
    seen.emplace_back(m.ep_rank, m.moe_tp_rank);
  }
  EXPECT_EQ(seen, (std::vector<std::pair<int, int>>{{0, 0}, {0, 1}, {1, 0}, {1, 1}}));
  expect_error(ErrorCode::config, "moe_ep_size * moe_tp_size = 2 * 3 must be dp * pcp * tp = 4",
               [] { moe::flatten({.tp_size = 4, .moe_ep_size = 2, .moe_tp_size = 3}); });
  expect_error(ErrorCode::config, "moe_ep_size must be at least 1, is 0", [] { moe::flatten({.tp_size = 4, .moe_ep_size = 0}); });
}

TEST(ParallelConfig, P13_SequenceSlices) {
  using moe::SequenceSlice;
  EXPECT_EQ(moe::sequence_slice(5, 4, 0), (SequenceSlice{8, 0, 2, 2}));
  EXPECT_EQ(moe::sequence_slice(5, 4, 1), (SequenceSlice{8, 2, 2, 2}));
  EXPECT_EQ(moe::sequence_slice(5, 4, 2), (SequenceSlice{8, 4, 2, 1}));
  EXPECT_EQ(moe::sequence_slice(5, 4, 3), (SequenceSlice{8, 6, 2, 0}));
  expect_error(ErrorCode::argument, "sp_rank 4 is out of range [0, 4)", [] { moe::sequence_slice(5, 4, 4); });
}

RC_GTEST_PROP(ParallelConfig, P13_GatheredSlicesRestoreTheOrder, ()) {
  int const n = *rc::gen::inRange(0, 100);
  int const sp = *rc::gen::inRange(1, 9);
  Ranks gathered;
  for (int r = 0; r < sp; ++r) {
    auto const slice = moe::sequence_slice(n, sp, r);
    RC_ASSERT(slice.rows * sp == slice.padded);
    RC_ASSERT(slice.padded >= n && slice.padded < n + sp);
    for (int i = 0; i < slice.rows; ++i) gathered.push_back(i < slice.valid ? slice.begin + i : -1);
  }
  gathered.resize(static_cast<std::size_t>(n));
  Ranks expected(static_cast<std::size_t>(n));
  std::iota(expected.begin(), expected.end(), 0);
  RC_ASSERT(gathered == expected);
}

moe::ProcessGrid grid_of(int xdp, int dp, int pp, int pcp, int tp, int dcp = 1) {
  return moe::ProcessGrid(moe::GridSizes{xdp, dp, pp, pcp, tp, dcp});
}

TEST(ProcessGrid, Groups) {
  moe::ProcessGrid const grid = grid_of(2, 2, 2, 1, 4, 2);
  EXPECT_EQ(grid.world_size(), 32);
  int const rank = grid.rank({.xdp = 1, .dp = 1, .pp = 0, .pcp = 0, .tp = 3});
  EXPECT_EQ(rank, 27);
  EXPECT_EQ(grid.group(GroupKind::tp, rank), (Ranks{24, 25, 26, 27}));
  EXPECT_EQ(grid.group(GroupKind::dp, rank), (Ranks{19, 27}));
  EXPECT_EQ(grid.group(GroupKind::pp, rank), (Ranks{27, 31}));
  EXPECT_EQ(grid.group(GroupKind::pcp, rank), (Ranks{27}));
  EXPECT_EQ(grid.group(GroupKind::dcp, rank), (Ranks{26, 27}));
  EXPECT_EQ(grid.group(GroupKind::ep, rank), (Ranks{16, 17, 18, 19, 24, 25, 26, 27}));
  EXPECT_EQ(grid.group(GroupKind::eplb, rank), grid.group(GroupKind::ep, rank));
  moe::ProcessGrid const context = grid_of(1, 1, 1, 2, 2, 4);
  EXPECT_EQ(context.group(GroupKind::dcp, 2), (Ranks{0, 1, 2, 3}));
  EXPECT_EQ(context.group(GroupKind::pcp, 1), (Ranks{1, 3}));
}

RC_GTEST_PROP(ProcessGrid, RoundTripAndEpGroupsPartitionTheWorld, ()) {
  bool const context = *rc::gen::arbitrary<bool>();
  auto const size = [] { return *rc::gen::inRange(1, 4); };
  moe::ProcessGrid const grid = grid_of(size(), context ? 1 : size(), size(), context ? size() : 1, size());
  std::set<Ranks> groups;
  for (int r = 0; r < grid.world_size(); ++r) {
    RC_ASSERT(grid.rank(grid.coordinates(r)) == r);
    Ranks const group = grid.group(GroupKind::ep, r);
    auto const at = grid.coordinates(r);
    auto const moe = moe::flatten({.tp_size = grid.sizes().tp,
                                   .tp_rank = at.tp,
                                   .pcp_size = grid.sizes().pcp,
                                   .pcp_rank = at.pcp,
                                   .dp_size = grid.sizes().dp,
                                   .dp_rank = at.dp,
                                   .enable_expert_parallel = true});
    RC_ASSERT(group[static_cast<std::size_t>(moe.flat_rank)] == r);
    groups.insert(group);
  }
  std::size_t members = 0;
  for (Ranks const& group : groups) members += group.size();
  RC_ASSERT(members == static_cast<std::size_t>(grid.world_size()));
}

TEST(ProcessGrid, NodesAreFoundByHostIdentity) {
  EXPECT_EQ(moe::node_of_ranks({"a", "a", "b", "a"}), (Ranks{0, 0, 1, 0}));
  EXPECT_EQ(moe::uniform_node_count({0, 0, 1, 1}), 2);
  EXPECT_EQ(moe::uniform_node_count({0, 0, 1, 0}), 1) << "not in consecutive runs";
  EXPECT_EQ(moe::uniform_node_count({0, 0, 1}), 1) << "uneven";
}

// A configuration of 8 ranks that passes every rule; each case below breaks one.
ParallelConfig good() {
  ParallelConfig config;
  config.grid = {.dp = 4, .tp = 2};
  config.world_size = 8;
  config.local_ranks = 8;
  config.visible_gpus = 8;
  config.enable_expert_parallel = true;
  config.num_experts = 256;
  config.topk = 8;
  config.hidden = 7168;
  config.intermediate_size = 2048;
  config.eplb.enable = true;
  config.eplb.num_redundant_experts = 8;
  return config;
}

template <class Change>
void rejected(std::string_view part, Change&& change) {
  ParallelConfig config = good();
  change(config);
  expect_error(ErrorCode::config, part, [&] { moe::validate(config); });
}

TEST(ParallelValidation, P7_AValidConfigurationPasses) {
  auto const resolved = moe::validate(good());
  EXPECT_EQ(resolved.num_physical, 264);
  EXPECT_EQ(resolved.moe.ep_size, 8);
  EXPECT_TRUE(resolved.moe.use_sp_moe());
}

TEST(ParallelValidation, P7_SizesAndRanks) {
  rejected("tp_size must be at least 1, is 0", [](auto& c) { c.grid.tp = 0; });
  rejected("dp_size must be at least 1, is -1", [](auto& c) { c.grid.dp = -1; });
  rejected("pp_size must be at least 1", [](auto& c) { c.grid.pp = 0; });
  rejected("pcp_size must be at least 1", [](auto& c) { c.grid.pcp = 0; });
  rejected("xdp_size must be at least 1", [](auto& c) { c.grid.xdp = 0; });
  rejected("dcp_size must be at least 1", [](auto& c) { c.grid.dcp = 0; });
  rejected("tp_size must be at most", [](auto& c) { c.grid.tp = 1 << 30; });
  rejected("world size exceeds", [](auto& c) { c.grid.tp = c.grid.dp = 1 << 20; });
  rejected("global rank 8 is out of range [0, 8)", [](auto& c) { c.global_rank = 8; });
  expect_error(ErrorCode::config, "dp_rank 2 is out of range [0, 2)", [] { moe::flatten({.dp_size = 2, .dp_rank = 2}); });
  expect_error(ErrorCode::config, "tp_rank -1 is out of range [0, 2)", [] { moe::flatten({.tp_size = 2, .tp_rank = -1}); });
  expect_error(ErrorCode::config, "pcp_rank 1 is out of range [0, 1)", [] { moe::flatten({.pcp_rank = 1}); });
  rejected("world size 7 is not xdp * dp * pp * pcp * tp = 1 * 4 * 1 * 1 * 2 = 8", [](auto& c) { c.world_size = 7; });
  rejected("local ranks = 8 exceed the 4 visible GPUs", [](auto& c) { c.visible_gpus = 4; });
  rejected("PCP with DP", [](auto& c) { c.grid.pcp = 2; });
  rejected("dcp_size = 3 must divide tp_size = 2", [](auto& c) { c.grid.dcp = 3; });
  rejected("dcp_size = 2 must be 1, pcp_size = 4 or tp_size * pcp_size = 8", [](auto& c) { c.grid = {.pcp = 4, .tp = 2, .dcp = 2}; });
  rejected("dp_local_size = 5 exceeds dp_size = 4", [](auto& c) { c.dp_local_size = 5; });
  rejected("external load balancing needs dp_size > 1", [](auto& c) {
    c.grid = {.tp = 8};
    c.external_load_balancing = true;
  });
  rejected("intermediate_size = 2047 must be divisible", [](auto& c) {
    c.enable_expert_parallel = false;
    c.intermediate_size = 2047;
  });
  rejected("more ranks than experts", [](auto& c) {
    c.eplb = {};
    c.num_experts = 7;
  });
  rejected("chunk size must be greater than 0, is 0", [](auto& c) { c.chunk_size = 0; });
  rejected("num_experts must be at least 1", [](auto& c) { c.num_experts = 0; });
}

TEST(ParallelValidation, P7_Eplb) {
  rejected("enable_expert_parallel must be set to use EPLB", [](auto& c) { c.enable_expert_parallel = false; });
  rejected("EPLB needs more than one rank", [](auto& c) {
    c.grid = {};
    c.world_size = 1;
  });
  rejected("redundant experts need EPLB", [](auto& c) { c.eplb.enable = false; });
  rejected("num_redundant_experts must be at least 0, is -1", [](auto& c) { c.eplb.num_redundant_experts = -1; });
  rejected("eplb window must be greater than 0, is 0", [](auto& c) { c.eplb.window = 0; });
  rejected("eplb step_interval must be greater than 0, is -3", [](auto& c) { c.eplb.step_interval = -3; });
  rejected("eplb log_interval must be greater than 0, is 0", [](auto& c) { c.eplb.log_interval = 0; });
  rejected("cannot run asynchronously", [](auto& c) { c.eplb.policy_async_capable = false; });
  rejected("elastic EP needs EPLB", [](auto& c) {
    c.eplb = {};
    c.enable_elastic_ep = true;
  });
  rejected("elastic EP needs pp_size = 1", [](auto& c) {
    c.enable_elastic_ep = true;
    c.grid.pp = 2;
    c.world_size = 16;
  });
  rejected("hybrid load balancing", [](auto& c) {
    c.enable_elastic_ep = true;
    c.hybrid_load_balancing = true;
  });
}

TEST(ParallelValidation, P7_BackendsAndPlacement) {
  rejected("DBO needs an asynchronous backend, naive is not", [](auto& c) {
    c.backend = moe::registry::backend_facts("naive");
    c.dbo.enable = true;
  });
  expect_error(ErrorCode::config, "unknown backend \"carrier_pigeon\"; known: all_to_all_v, allgather_reduce_scatter, naive",
               [] { moe::registry::backend_facts("carrier_pigeon"); });
  expect_error(ErrorCode::unsupported, "absent from GPU 0 to GPU 3",
               [] { moe::check_peer_access("low_latency", 4, [](int a, int b) { return !(a == 0 && b == 3); }); });
  EXPECT_NO_THROW(moe::check_peer_access("low_latency", 4, [](int, int) { return true; }));
  expect_error(ErrorCode::unsupported, "needs GPU architecture sm_90 or newer, this GPU is sm_80",
               [] { moe::check_arch("low_latency", 80, 90); });
  rejected("round_robin expert placement does not apply", [](auto& c) {
    c.placement = moe::PlacementStrategy::round_robin;
    c.num_expert_group = 8;
    c.strict_placement = true;
  });
  ParallelConfig config = good();
  config.eplb = {};
  config.num_expert_group = 8;
  config.placement = moe::PlacementStrategy::round_robin;
  EXPECT_EQ(moe::validate(config).placement.strategy, moe::PlacementStrategy::round_robin);
}

TEST(ParallelValidation, P8_RedundancyThatDoesNotDivide) {
  rejected("P must be divisible by ep_size; nearest valid num_redundant_experts are 0 or 8",
           [](auto& c) { c.eplb.num_redundant_experts = 1; });
  rejected("nearest valid num_redundant_experts are 6 (", [](auto& c) {
    c.num_experts = 258;
    c.eplb.num_redundant_experts = 1;
  });
  rejected("nearest valid num_redundant_experts are 4 (num_experts = 60, num_redundant_experts = 0", [](auto& c) {
    c.num_experts = 60;
    c.eplb.num_redundant_experts.reset();  // 0
  });
  ParallelConfig config = good();
  config.eplb.num_redundant_experts.reset();
  config.num_experts = 64;
  EXPECT_EQ(moe::validate(config).num_redundant, 0);
}

TEST(ParallelValidation, P9_FingerprintNamesTheFieldOnAllRanks) {
  ParallelConfig odd = good();
  odd.hidden = 4096;
  odd.topk = 6;
  std::vector<std::string> wire{moe::fingerprint(good()).encode(), moe::fingerprint(good()).encode(), moe::fingerprint(odd).encode()};
  for (ParallelConfig const& mine : {good(), good(), odd}) {
    expect_error(ErrorCode::mismatch, "ranks disagree about topk: rank 0 has 8, rank 2 has 6",
                 [&] { moe::check_identical_over(moe::fingerprint(mine), [&](std::string const&) { return wire; }); });
  }
  EXPECT_NE(moe::fingerprint(good()).hash(), moe::fingerprint(odd).hash());
  ParallelConfig elsewhere = good();
  elsewhere.global_rank = 5;
  elsewhere.local_ranks = 4;
  EXPECT_EQ(moe::fingerprint(good()), moe::fingerprint(elsewhere)) << "what is local to a rank may differ";
  EXPECT_EQ(moe::Fingerprint::decode(moe::fingerprint(odd).encode()), moe::fingerprint(odd));
  EXPECT_NO_THROW(moe::check_identical({moe::fingerprint(good()), moe::fingerprint(elsewhere)}));
  expect_error(ErrorCode::mismatch, "cannot be read", [] { moe::Fingerprint::decode("hidden"); });
  moe::Fingerprint shorter;
  shorter.add("world_size", 8);
  expect_error(ErrorCode::mismatch, "is not part of", [&] { moe::check_identical({moe::fingerprint(good()), shorter}); });
}

// Every field of the configuration that ranks must share changes the fingerprint.
TEST(ParallelValidation, P9_EveryCollectiveFieldCounts) {
  auto const base = moe::fingerprint(good());
  std::set<std::string> names;
  for (auto const& [field, value] : base.fields()) EXPECT_TRUE(names.insert(field).second) << field << " twice";
  auto const changes = [&](auto&& change) {
    ParallelConfig config = good();
    change(config);
    EXPECT_NE(moe::fingerprint(config), base);
  };
  changes([](auto& c) { c.grid.pp = 2; });
  changes([](auto& c) { c.backend = moe::registry::backend_facts("naive"); });
  changes([](auto& c) { c.moe_ep_size = 4; });
  changes([](auto& c) { c.eplb.window = 7; });
  changes([](auto& c) { c.eplb.policy = "other"; });
  changes([](auto& c) { c.dbo.decode_threshold = 7; });
  changes([](auto& c) { c.placement = moe::PlacementStrategy::round_robin; });
  changes([](auto& c) { c.chunk_size = 7; });
}

}  // namespace
