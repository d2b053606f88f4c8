// SPDX-License-Identifier: Apache-2.0
// tests/unit/runner_reduction_test.cpp: the table of reductions, row by row, over the grids that give each row.
#include "moe/runner/reduction.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace {

using namespace moe;
using namespace moe::runner;

constexpr BackendFacts kLocal{.name = "local", .transport = Transport::local};
constexpr BackendFacts kGather{.name = "gather", .transport = Transport::gather};
constexpr BackendFacts kGatherSp{.name = "gather, sequence parallel", .sequence_parallel = true, .transport = Transport::gather};
constexpr BackendFacts kAllToAll{.name = "all to all", .transport = Transport::all_to_all};
constexpr BackendFacts kAllToAllSp{.name = "all to all, sequence parallel", .sequence_parallel = true, .transport = Transport::all_to_all};

/// One row of the table: the grid, the expected sums without shared experts, and with partial ones.
struct Row {
  char const* situation;
  int tp, dp, pcp;
  bool ep;
  BackendFacts backend;
  ReductionPlan without_shared, with_shared;
};

constexpr ReductionPlan kNothing{};
constexpr ReductionPlan kShared{.shared_early = true};
constexpr ReductionPlan kFinal{.routed_partial = true, .final = true};

std::vector<Row> const kTable{
    {"one rank", 1, 1, 1, false, kLocal, kNothing, kNothing},
    {"one rank, the flag has no effect", 1, 1, 1, true, kLocal, kNothing, kNothing},
    {"EP off, DP=1", 2, 1, 1, false, kLocal, kFinal, kFinal},
    {"EP off, DP=1, a gathering backend of one rank", 4, 1, 1, false, kGather, kFinal, kFinal},
    {"EP off, PCP=2", 2, 1, 2, false, kLocal, kFinal, kFinal},
    {"EP on, TP only, local", 2, 1, 1, true, kLocal, kFinal, kFinal},
    {"EP on, TP only, local, 4 ranks", 4, 1, 1, true, kLocal, kFinal, kFinal},
    {"DP>1, EP off, gather, TP=1", 1, 2, 1, false, kGatherSp, kNothing, kNothing},
    {"DP>1, EP off, gather, TP>1", 2, 2, 1, false, kGatherSp, kFinal, kFinal},
    {"EP on, DP>1, TP=1, gather", 1, 4, 1, true, kGatherSp, kNothing, kNothing},
    {"EP on, DP>1, TP>1, gather, no SP", 2, 2, 1, true, kGather, kFinal, kFinal},
    {"EP on, PCP=2, TP=2", 2, 1, 2, true, kGather, kFinal, kFinal},
    {"EP on, SP, gather", 2, 2, 1, true, kGatherSp, kNothing, kShared},
    {"EP on, SP, all to all", 4, 2, 1, true, kAllToAllSp, kNothing, kShared},
    {"output is reduced, TP only", 2, 1, 1, true, kAllToAll, kNothing, kShared},
    {"output is reduced, DP>1, TP>1", 2, 2, 1, true, kAllToAll, kNothing, kShared},
    {"output is reduced, TP=1", 1, 4, 1, true, kAllToAll, kNothing, kNothing},
    // Chunks change nothing: each pass sums as its transport (mpi.runner_grid_test, ChunksSumAsTheirTransport).
    {"dp_chunking, output is reduced", 2, 4, 1, true, kAllToAll, kNothing, kShared},
    {"dp_chunking, gather", 2, 4, 1, true, kGather, kFinal, kFinal},
    {"dp_chunking, SP", 2, 4, 1, true, kAllToAllSp, kNothing, kShared},
};

MoeParallel parallel_of(Row const& row) {
  return flatten({.tp_size = row.tp, .pcp_size = row.pcp, .dp_size = row.dp, .enable_expert_parallel = row.ep, .backend = row.backend});
}

TEST(RunnerReduction, Table) {
  for (Row const& row : kTable) {
    SCOPED_TRACE(row.situation);
    ReductionFacts facts = reduction_facts(parallel_of(row));
    EXPECT_EQ(plan_reductions(facts), row.without_shared);
    EXPECT_FALSE(must_reduce_shared(facts));
    facts.shared = SharedOutput::partial;
    EXPECT_EQ(plan_reductions(facts), row.with_shared);
    EXPECT_EQ(must_reduce_shared(facts), row.with_shared.shared_early);
    facts.shared = SharedOutput::complete;
    EXPECT_EQ(plan_reductions(facts), row.without_shared);
  }
}

// The caller sums a partial output itself. A complete one stays complete, with its shared part.
TEST(RunnerReduction, TheCallerReduces) {
  for (Row const& row : kTable) {
    SCOPED_TRACE(row.situation);
    ReductionFacts facts = reduction_facts(parallel_of(row));
    facts.shared = SharedOutput::partial;
    facts.reduce_results = false;
    ReductionPlan const plan = plan_reductions(facts);
    EXPECT_FALSE(plan.final);
    EXPECT_FALSE(plan.routed_early);
    EXPECT_EQ(plan.result_partial, row.with_shared.final);
    EXPECT_EQ(plan.shared_early, row.with_shared.shared_early);
  }
}

// A latent block sums in the latent space, and then its shared output alone.
TEST(RunnerReduction, BeforeTheOutputStep) {
  ReductionFacts facts{.tp_size = 2, .moe_tp_size = 2, .shared = SharedOutput::partial, .output = OutputStep::linear};
  ReductionPlan const early{.routed_partial = true, .routed_early = true, .shared_early = true};
  EXPECT_EQ(plan_reductions(facts), early);
  facts.output = OutputStep::nonlinear;
  EXPECT_EQ(plan_reductions(facts), early);
  facts.reduce_results = false;  // a norm needs the sum, even if the caller reduces the results
  EXPECT_EQ(plan_reductions(facts), early);
  facts.output = OutputStep::linear;  // a projection commutes with the caller's sum
  EXPECT_EQ(plan_reductions(facts), (ReductionPlan{.routed_partial = true, .result_partial = true}));
  facts.nonlinear_end = true;
  EXPECT_EQ(plan_reductions(facts), early);
  facts.output = OutputStep::none;
  EXPECT_EQ(plan_reductions(facts), kFinal);
  facts = {.tp_size = 2, .moe_tp_size = 2, .shared = SharedOutput::complete, .output = OutputStep::linear};
  EXPECT_EQ(plan_reductions(facts), (ReductionPlan{.routed_partial = true, .routed_early = true}));
}

TEST(RunnerReduction, IsAConstantExpression) {
  static_assert(plan_reductions({.tp_size = 2, .moe_tp_size = 2}).final);
  static_assert(must_reduce_shared({.tp_size = 2, .ep_size = 2, .transport = Transport::all_to_all, .shared = SharedOutput::partial}));
}

// A part of an expert's columns on each of two ranks, among which the transport does not sum.
TEST(RunnerReduction, ExplicitSizes) {
  MoeParallel const p = flatten({.tp_size = 2, .dp_size = 2, .backend = kAllToAll, .moe_ep_size = 2, .moe_tp_size = 2});
  EXPECT_EQ(parallel_conflict(p), nullptr);
  EXPECT_EQ(plan_reductions(reduction_facts(p)), kFinal);
  MoeParallel const other = flatten({.tp_size = 4, .backend = kAllToAll, .moe_ep_size = 2, .moe_tp_size = 2});
  EXPECT_NE(parallel_conflict(other), nullptr);
  // Where every rank has all rows, a sum over all ranks completes the output.
  for (BackendFacts const& backend : {kLocal, kGather}) {
    EXPECT_EQ(parallel_conflict(flatten({.tp_size = 4, .backend = backend, .moe_ep_size = 2, .moe_tp_size = 2})), nullptr);
  }
  EXPECT_EQ(parallel_conflict(flatten({.dp_size = 4, .backend = kGather, .moe_ep_size = 2, .moe_tp_size = 2})), nullptr);
  EXPECT_NE(parallel_conflict(flatten({.tp_size = 3, .dp_size = 2, .backend = kGather, .moe_ep_size = 3, .moe_tp_size = 2})), nullptr);
  MoeParallel const split = flatten({.tp_size = 2, .dp_size = 2, .backend = kAllToAllSp, .moe_ep_size = 2, .moe_tp_size = 2});
  EXPECT_NE(parallel_conflict(split), nullptr);
}

TEST(RunnerReduction, GroupOfTheLayer) {
  auto group = [](int tp, int dp, int pcp, bool ep, BackendFacts const& backend) {
    MoeParallel const p = flatten({.tp_size = tp, .pcp_size = pcp, .dp_size = dp, .enable_expert_parallel = ep, .backend = backend});
    return text(name(layer_group(p)), ' ', layer_group_size(p));
  };
  EXPECT_EQ(group(2, 4, 1, true, kLocal), "self 1");
  EXPECT_EQ(group(2, 4, 1, false, kGatherSp), "tokens 4");
  EXPECT_EQ(group(2, 1, 2, true, kGather), "tokens 2");
  EXPECT_EQ(group(2, 4, 1, true, kGather), "tokens 4");
  EXPECT_EQ(group(2, 4, 1, true, kGatherSp), "ep 8");
  EXPECT_EQ(group(2, 4, 1, true, kAllToAllSp), "ep 8");
}

TEST(RunnerReduction, Conflicts) {
  auto conflict = [](int tp, int dp, bool ep, BackendFacts const& backend) {
    char const* const found = parallel_conflict(flatten({.tp_size = tp, .dp_size = dp, .enable_expert_parallel = ep, .backend = backend}));
    return std::string(found == nullptr ? "" : found);
  };
  EXPECT_NE(conflict(1, 2, false, kAllToAll).find("enable expert parallelism"), std::string::npos);
  EXPECT_NE(conflict(2, 1, false, kAllToAll).find("enable expert parallelism"), std::string::npos);
  EXPECT_EQ(conflict(1, 1, false, kAllToAll), "");
  EXPECT_EQ(conflict(1, 2, true, kAllToAll), "");
  BackendFacts local = kLocal;
  local.sequence_parallel = true;
  EXPECT_NE(conflict(2, 2, true, local).find("hold different tokens"), std::string::npos);
  EXPECT_NE(conflict(1, 2, false, kLocal).find("hold different tokens"), std::string::npos);
  EXPECT_EQ(conflict(2, 1, true, kLocal), "");
}

}  // namespace
