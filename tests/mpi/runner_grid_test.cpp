// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_grid_test.cpp: every host composition of the registry, on every grid of tensor, data and context parallel ranks, gives
// what one rank gives; wrong calls reach all ranks. The compositions are in runner_grid_test/.
// moe-ranks: 1 2 4 8 16
#include <algorithm>
#include <cmath>

#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/backends/window/host/one_sided.hpp"
#include "moe/backends/window/host/pplx.hpp"
#include "moe/backends/window/host/two_sided.hpp"
#include "runner_grid_test/harness.hpp"

namespace {

using namespace moe_test::grid;
namespace hana = boost::hana;
using moe_test::expect_error;

/// Fails if another number of combinations ran than is stated here.
class AllRan : public testing::Environment {
 public:
  void TearDown() override {
    if (testing::GTEST_FLAG(filter) != "*") return;
    std::map<int, Count> const expected{
        {1, {23, 1584, 0}}, {2, {23, 2808, 1944}}, {4, {23, 4510, 3410}}, {8, {23, 452, 412}}, {16, {23, 478, 386}}};
    EXPECT_EQ(count, expected.at(world_size())) << "another number of combinations is legal, or some did not run: count again";
  }
};
[[maybe_unused]] testing::Environment* const all_ran = testing::AddGlobalTestEnvironment(new AllRan);

// A rank with a wrong argument, and a TP group whose ranks differ: all ranks get an error, and the next call works.
TEST(RunnerGridErrors, ReachAllRanks) {
  int const n = world_size(), last = n - 1;
  if (n == 1) GTEST_SKIP() << "needs more than one rank";
  int const tp = 2;
  Model const m{.form = {false, false, SharedOutput::partial}, .experts = std::max(kExperts, n)};
  Rank<backends::AllGatherReduceScatter<comm::Mpi>, experts::Reference<float>> rank({tp, n / tp, 1, true}, m, world_rank(),
                                                                                    {.name = "gather", .transport = Transport::gather});
  bool const errs = world_rank() == last;
  std::vector<float> const x = bf16_numbers(50, 3 * kHidden);
  std::vector<float> out(x.size());
  auto forward = [&](std::int64_t rows, std::int64_t out_rows) {
    rank.runner.forward(make_rows(x.data(), rows, kHidden), make_rows(out.data(), out_rows, kHidden));
  };
  if (errs) {
    expect_error(ErrorCode::argument, "output: rows: 2, expected 3", [&] { forward(3, 2); });
  } else {
    expect_error(ErrorCode::peer, "", [&] { forward(3, 3); });
  }
  forward(3, 3);
  if (rank.moe.dp_rank == rank.moe.dp_size - 1) {
    expect_error(ErrorCode::mismatch, "TP ranks hold the same tokens", [&] { forward(errs ? 2 : 3, errs ? 2 : 3); });
  } else {
    expect_error(ErrorCode::peer, "", [&] { forward(3, 3); });
  }
  forward(3, 3);
}

// ---- The cases of grids by name.

using Gather = backends::AllGatherReduceScatter<comm::Mpi>;
using AllToAll = backends::AllToAllV<comm::Mpi>;

float largest_difference(std::vector<float> const& a, std::vector<float> const& b) {
  float out = 0;
  for (std::size_t i = 0; i < a.size(); ++i) out = std::max(out, std::abs(a[i] - b[i]));
  return out;
}
/// A block on a grid, equal to one rank; returns the output.
template <class Backend, class Parts>
std::vector<float> equals_one_rank(Rank<Backend, experts::Reference<float>, Parts>& rank, Model const& m) {
  std::vector<float> const x = tokens(rank.moe, m.hidden), want = on_one_rank(m, x), got = rank.forward(x);
  EXPECT_EQ(got.size(), want.size());
  EXPECT_LE(largest_difference(got, want), 2e-5F);
  return got;
}
/// TP ranks hold the same rows.
template <class Backend>
BackendFacts whole_rows() {
  BackendFacts facts = Backend::kFacts;
  facts.sequence_parallel = false;
  return facts;
}
Model model_of(Form const& form) { return {.form = form, .experts = std::max(kExperts, world_size())}; }

// The routed output is complete and the shared one a term: it is summed alone. Without its sum, or with both summed, values differ.
TEST(RunnerGridCases, N5_SharedAloneWhereTheTransportReduces) {
  int const n = world_size();
  if (n == 1 || n > 8) GTEST_SKIP() << "of 2, 4 and 8 ranks";
  Model const m = model_of({false, false, SharedOutput::partial});
  Rank<AllToAll, experts::Reference<float>> rank({2, n / 2, 1, true}, m, world_rank(), whole_rows<AllToAll>());
  EXPECT_TRUE(rank.runner.reductions().shared_early);
  EXPECT_FALSE(rank.runner.reductions().final);
  std::vector<float> const got = equals_one_rank(rank, m);
  Model part = m;  // what one rank's part of the shared columns gives
  for (std::size_t i = 0; i < part.shared2.size(); ++i) part.shared2[i] *= i % kShared < kShared / 2 ? 1.0F : 0.0F;
  EXPECT_EQ(largest_difference(got, on_one_rank(part, tokens(rank.moe))) > 1e-3F, !got.empty());
}

// 256 columns of the routed path in a layer of 384, in a block of 512. What the padding columns hold must reach no output: the experts'
// weights there are not zero.
template <class Backend>
void n8_latent_with_padding() {
  int const n = world_size();
  Form const form{true, true, SharedOutput::partial};
  Model const m{.form = form, .experts = std::max(kExperts, n), .hidden = 512, .latent = 256, .padding = 128};
  Rank<Backend, experts::Reference<float>> rank({2, n / 2, 1, true}, m, world_rank(), whole_rows<Backend>());
  EXPECT_EQ(rank.runner.reductions().routed_early, Backend::kFacts.transport == Transport::gather);
  EXPECT_TRUE(rank.runner.reductions().shared_early);
  EXPECT_EQ(rank.runner.layer().shape().hidden(), 384);
  EXPECT_EQ(rank.runner.hidden(), 512);
  equals_one_rank(rank, m);
  equals_one_rank(rank, m);  // with what the first forward left in its memory
}
TEST(RunnerGridCases, N8_LatentIsSummedBeforeItsProjection) {
  if (world_size() == 1 || world_size() > 8) GTEST_SKIP() << "of 2, 4 and 8 ranks";
  n8_latent_with_padding<Gather>();
  n8_latent_with_padding<AllToAll>();
}

// In chunks the sums are those of the transport, in each pass: of a gather's term, or of the shared output alone.
template <class Backend>
void chunks_sum_as_their_transport() {
  Model const m = model_of({false, false, SharedOutput::partial});
  using InChunks = Rank<Backend, experts::Reference<float>, RankChunkParts>;
  Grid const grid{2, world_size() / 2, 1, true};
  InChunks chunked(grid, m, world_rank(), whole_rows<Backend>());
  Rank<Backend, experts::Reference<float>> whole(grid, m, world_rank(), whole_rows<Backend>());
  EXPECT_EQ(chunked.runner.reductions(), whole.runner.reductions());
  EXPECT_EQ(chunked.runner.reductions().final, Backend::kFacts.transport == Transport::gather);
  struct Sums : NoProbe {
    int count = 0;
    void begin(Phase phase) { count += phase == Phase::reduction ? 1 : 0; }
  } in_chunks, at_once;
  std::vector<float> const x = tokens(chunked.moe);
  std::vector<float> const got = chunked.forward(x, in_chunks), want = whole.forward(x, at_once);
  EXPECT_LE(largest_difference(got, want), 2e-5F);
  EXPECT_EQ(at_once.count, 1);
  constexpr int kMostTokens = 5;  // of tokens(), those of the first DP rank
  EXPECT_EQ(in_chunks.count, (kMostTokens + kChunk - 1) / kChunk) << "one sum a pass, on a rank without rows, too";
}
TEST(RunnerGridCases, ChunksSumAsTheirTransport) {
  if (world_size() == 1 || world_size() > 8) GTEST_SKIP() << "of 2, 4 and 8 ranks";
  chunks_sum_as_their_transport<Gather>();
  chunks_sum_as_their_transport<AllToAll>();
}

TEST(RunnerGridCases, N9_ContextParallelRanks) {
  if (world_size() == 1) GTEST_SKIP() << "needs two ranks";
  Model const m = model_of({false, false, SharedOutput::partial});
  Rank<Gather, experts::Reference<float>> rank({world_size() / 2, 1, 2, true}, m, world_rank());
  EXPECT_EQ(rank.layer_group->size(), 2) << "gathered over the PCP group alone";
  EXPECT_EQ(rank.moe.ep_size, world_size());
  equals_one_rank(rank, m);
}

// 5 rows on 4 TP ranks: 2, 2, 1 and none; the first DP rank has 5, the second 3.
TEST(RunnerGridCases, N10_SequenceParallelRowsAreRestored) {
  if (world_size() != 8) GTEST_SKIP() << "of 8 ranks";
  Model const m = model_of({false, false, SharedOutput::complete});
  BackendFacts facts = AllToAll::kFacts;
  facts.sequence_parallel = true;
  Rank<AllToAll, experts::Reference<float>> rank({4, 2, 1, true}, m, world_rank(), facts);
  ASSERT_EQ(rank.moe.sp_size, 4);
  std::int64_t const rows[] = {2, 2, 1, 0};
  EXPECT_EQ(runner::parallel::slice_of(5, rank.moe).rows, rows[rank.moe.tp_rank]);
  equals_one_rank(rank, m);
}

/// Experts divided over ep ranks and each one's columns over moe_tp ranks. Returns what the rules say, or null if the block equals one
/// rank.
template <class Backend, class Experts>
char const* explicit_sizes(Grid const& g, BackendFacts const& facts, Form const& form) {
  SCOPED_TRACE(text(Backend::kName, ": tp ", g.tp, ", dp ", g.dp, ", pcp ", g.pcp, ", moe_ep ", *g.moe_ep, ", moe_tp ", *g.moe_tp, ", sp ",
                    facts.sequence_parallel, ", latent ", form.latent, ", norm ", form.norm, ", shared ", static_cast<int>(form.shared)));
  Model const m = model_of(form);
  MoeParallel const parallel = parallel_of(g, world_rank(), facts);
  if (char const* const conflict = runner::parallel_conflict(parallel)) {
    expect_error(ErrorCode::config, conflict, [&] { Rank<Backend, Experts> rank(g, m, world_rank(), facts); });
    return conflict;
  }
  Rank<Backend, Experts> rank(g, m, world_rank(), facts);
  EXPECT_EQ(rank.moe.ep_rank, world_rank() / *g.moe_tp);
  EXPECT_EQ(rank.moe.moe_tp_rank, world_rank() % *g.moe_tp);
  equals_one_rank(rank, m);
  return nullptr;
}
TEST(RunnerGridCases, P17_ExplicitSizes) {
  int const n = world_size();
  if (n != 4) GTEST_SKIP() << "of 4 ranks";
  Form const plain{false, false, SharedOutput::partial};
  Form const all[] = {plain, {true, true, SharedOutput::partial}, {true, false, SharedOutput::complete, false}};
  int equal = 0, refused = 0;
  hana::for_each(registry::all_host_backends, [&](auto type) {
    using Backend = typename decltype(type)::type;
    for (Grid g : grids(n)) {
      if (!g.ep) continue;
      g.moe_ep = g.moe_tp = 2;
      for (Form const& form : all) {
        bool const legal = explicit_sizes<Backend, experts::Reference<float>>(g, whole_rows<Backend>(), form) == nullptr;
        bool const moves = Backend::kFacts.transport != Transport::local || g.tp == n;
        EXPECT_EQ(legal, Backend::kFacts.transport == Transport::all_to_all ? g.tp == 2 : moves) << Backend::kName;
        ++(legal ? equal : refused);
      }
    }
  });
  EXPECT_GT(equal, 0);
  EXPECT_GT(refused, 0);
  // Each TP rank would have rows of its own.
  BackendFacts rows_apart = AllToAll::kFacts;
  rows_apart.sequence_parallel = true;
  Grid const two_columns{2, 2, 1, true, 2, 2};
  EXPECT_TRUE((explicit_sizes<AllToAll, experts::Reference<float>>(two_columns, rows_apart, plain)));
}

// A row's zero experts give it once, whichever ranks sum; some rows have one.
TEST(RunnerGridCases, N18_ZeroExpertsAreAddedOnce) {
  int const n = world_size();
  if (n == 1 || n > 8) GTEST_SKIP() << "of 2, 4 and 8 ranks";
  Model const m = model_of({false, false, SharedOutput::partial});
  Rank<Gather, experts::Reference<float>> rank({2, n / 2, 1, true}, m, world_rank(), whole_rows<Gather>());
  equals_one_rank(rank, m);
  auto const ids = rank.runner.topk_ids();
  bool const zero = std::any_of(ids.data_handle(), ids.data_handle() + ids.size(), [&](std::int32_t id) { return id >= m.experts; });
  EXPECT_TRUE(zero || rank.moe.dp_rank > 0) << "no row of the test chose a zero expert";
}

}  // namespace
