// SPDX-License-Identifier: Apache-2.0
// tests/mpi/eplb_weight_mover_test.cpp: expert weights between processes: random plans against direct copies, scaling, and ranks that
// disagree, fail or are missing (cases B7, B8, B11, B16 and the error rows of docs/semantics/eplb.md §11).
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <chrono>
#include <cstdlib>

#include "expect_error.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/mpi_shared.hpp"
#include "moe/comm/self.hpp"
#include "moe/eplb/balancer.hpp"
#include "moe/eplb/elastic.hpp"
#include "moe/eplb/rearrange.hpp"
#include "tests/mpi/eplb_harness.hpp"

namespace {

using namespace moe_test;
using moe::ErrorCode;
using moe::text;
using moe::comm::Mpi;
using moe::eplb::CommGroup;
using moe::eplb::rearrange;
using moe::eplb::WeightMover;

// All ranks must draw the same cases; a failing rank must not shrink its case alone.
bool const kSameCases = setenv("RC_PARAMS", "seed=20 max_success=150 noshrink=1", 1) == 0;

/// The mover's communicator, the engine's, and the group that agrees over it.
struct Ranks {
  explicit Ranks(std::int64_t timeout_ms = 20'000)
      : weights(MPI_COMM_WORLD, {.timeout_ms = timeout_ms}), engine(MPI_COMM_WORLD, {.timeout_ms = 2 * timeout_ms}), group(engine) {}
  int rank() const { return weights.rank(); }
  int size() const { return weights.size(); }
  bool is_last() const { return rank() == size() - 1; }
  Mpi weights, engine;
  CommGroup<Mpi> group;
};

/// A window large enough for the experts of these tests.
struct Window {
  explicit Window(Ranks& ranks) : window(ranks.weights, 1 << 17) {}
  WeightMover<Mpi>::Params params() const { return {.peers = moe::eplb::peer_buffers(window)}; }
  moe::comm::MpiShared window;
};

RC_GTEST_PROP(WeightMover, B7_RandomMapsEveryExpertSlotHoldsItsExpert, ()) {
  ASSERT_TRUE(kSameCases);
  static Ranks ranks;
  static Window const peers(ranks);
  bool const in_window = *rc::gen::arbitrary<bool>();
  int const slots = *rc::gen::inRange(1, 7);
  int const physical = slots * ranks.size();
  int const logical = *rc::gen::inRange(1, physical + 1);
  int const layers = *rc::gen::inRange(1, 4);
  int const wide = *rc::gen::element(64, 200, 5000);
  auto const seed = *rc::gen::inRange<unsigned>(0, 1U << 30U);
  ExpertMaps maps = random_maps(layers, logical, physical, seed);
  ExpertMaps const next = random_maps(layers, logical, physical, seed + 1);
  PatternWeights weights(layers, slots, wide);
  weights.load(maps, ranks.rank());
  WeightMover<Mpi> mover(ranks.weights, weights.tensors(), slots, in_window ? peers.params() : WeightMover<Mpi>::Params{});
  std::int64_t largest = 0;
  for (int bytes : {wide + 8 * (layers - 1), wide / 2, 12, 4, 20}) largest += (bytes + 255) / 256 * 256;
  RC_ASSERT(WeightMover<Mpi>::bytes_needed(weights.tensors(), slots) == slots * largest);
  RC_ASSERT(mover.buffer_bytes() == slots * largest);  // one layer's experts of this rank, nothing more

  std::vector<int> committed;
  auto const report = rearrange(mover, maps, next, ranks.group, [&](int layer) {
    RC_ASSERT(weights.check(layer, next.physical_to_logical().row(layer), ranks.rank()) == "");
    maps.set_layer(layer, next);
    committed.push_back(layer);
  });
  RC_ASSERT(maps == next);
  RC_ASSERT(weights.check(next, ranks.rank()) == "");
  RC_ASSERT(std::is_sorted(committed.begin(), committed.end()));
  RC_ASSERT(report.layers_changed == static_cast<int>(committed.size()));
  // The bytes that all ranks sent equal the bytes that all ranks received.
  std::vector<std::int64_t> sums{report.moved.bytes_sent, report.moved.bytes_received};
  ranks.group.all_reduce_sum(sums);
  RC_ASSERT(sums[0] == sums[1]);
}

TEST(WeightMover, B8_EqualMapsMoveNothing) {
  Ranks ranks;
  ExpertMaps const maps = random_maps(3, 2 * ranks.size(), 3 * ranks.size(), 5);
  PatternWeights weights(3, 3, 64);
  weights.load(maps, ranks.rank());
  WeightMover<Mpi> mover(ranks.weights, weights.tensors(), 3);
  auto const report = rearrange(mover, maps, maps, ranks.group, [](int) { FAIL() << "no layer changes"; });
  EXPECT_EQ(report.layers_changed, 0);
  EXPECT_EQ(report.moved, moe::eplb::MoveStats{});
}

TEST(WeightMover, ReplicaOrderAloneNeedsNoWeights) {
  Ranks ranks;
  int const physical = 2 * ranks.size();
  Ids row(static_cast<std::size_t>(physical), 0), forwards(row.size()), backwards(row.size());
  std::iota(forwards.begin(), forwards.end(), 0);
  std::reverse_copy(forwards.begin(), forwards.end(), backwards.begin());
  auto const with = [&](Ids const& replica) {
    return ExpertMaps(Table<std::int32_t>(std::vector<Ids>{row}), Table<std::int32_t>(std::vector<Ids>{replica}), 1);
  };
  ExpertMaps maps = with(forwards);
  PatternWeights weights(1, 2, 64);
  weights.load(maps, ranks.rank());
  WeightMover<Mpi> mover(ranks.weights, weights.tensors(), 2);
  auto const report = rearrange(mover, maps, with(backwards), ranks.group, [&](int layer) { maps.set_layer(layer, with(backwards)); });
  EXPECT_EQ(report.layers_changed, 1);
  EXPECT_EQ(report.moved, moe::eplb::MoveStats{});
  EXPECT_EQ(maps, with(backwards));
}

TEST(WeightMover, ProfileLeavesWeightsAndCounters) {
  Ranks ranks;
  Window const peers(ranks);
  ExpertMaps const maps = random_maps(2, 2 * ranks.size(), 2 * ranks.size(), 6);
  PatternWeights weights(2, 2, 300);
  weights.load(maps, ranks.rank());
  for (bool in_window : {false, true}) {
    WeightMover<Mpi> mover(ranks.weights, weights.tensors(), 2, in_window ? peers.params() : WeightMover<Mpi>::Params{});
    mover.profile();
    EXPECT_EQ(weights.check(maps, ranks.rank()), "");
    EXPECT_EQ(mover.stats(), moe::eplb::MoveStats{});
    EXPECT_EQ(mover.fetched_layer(), -1);
  }
}

// Stores into a window move what messages move, and the window is the only spare buffer.
TEST(WeightMover, AWindowMovesWhatMessagesMove) {
  Ranks ranks;
  Window const peers(ranks);
  int const n = ranks.size();
  ExpertMaps const before = random_maps(3, 3 * n - 1, 3 * n, 11), after = random_maps(3, 3 * n - 1, 3 * n, 12);
  std::vector<moe::eplb::MoveStats> moved;
  for (bool in_window : {false, true}) {
    PatternWeights weights(3, 3, 500);
    weights.load(before, ranks.rank());
    WeightMover<Mpi> mover(ranks.weights, weights.tensors(), 3, in_window ? peers.params() : WeightMover<Mpi>::Params{});
    moved.push_back(rearrange(mover, before, after, ranks.group, [](int) {}).moved);
    EXPECT_EQ(weights.check(after, ranks.rank()), "");
    moved.push_back(rearrange(mover, after, before, ranks.group, [](int) {}).moved);
    EXPECT_EQ(weights.check(before, ranks.rank()), "");
  }
  EXPECT_EQ(moved[0], moved[2]);
  EXPECT_EQ(moved[1], moved[3]);
  std::vector<std::int64_t> sent{moved[0].bytes_sent};
  ranks.group.all_reduce_sum(sent);
  EXPECT_EQ(sent[0] > 0, n > 1);
}

// A window that one rank cannot use, or that only some ranks have, is an error on all, and the next mover works.
TEST(WeightMover, WindowsThatDoNotFit) {
  Ranks ranks;
  Window const peers(ranks);
  int const n = ranks.size();
  bool const last = ranks.is_last();
  PatternWeights weights(1, 2, 64);
  auto const construct = [&](WeightMover<Mpi>::Params const& params) { WeightMover<Mpi>(ranks.weights, weights.tensors(), 2, params); };
  auto const refused = [&](ErrorCode code, std::string const& what, WeightMover<Mpi>::Params const& mine) {
    expect_error(last ? code : ErrorCode::peer, last ? what : text("construction of the weight mover failed on rank ", n - 1),
                 [&] { construct(last ? mine : peers.params()); });
  };
  auto params = peers.params();
  params.peers.bytes = 2047;
  refused(ErrorCode::capacity, "peers: the window has 2047 bytes a rank, one layer's experts need 2560", params);
  params = peers.params();
  params.peers.parts.push_back(params.peers.parts[0]);
  refused(ErrorCode::argument, text("peers: a window of ", n + 1, " ranks, the communicator has ", n), params);
  params = peers.params();
  params.peers.parts[0] = nullptr;
  refused(ErrorCode::argument, "peers: a part is null", params);
  if (n > 1) {
    expect_error(ErrorCode::mismatch, text("weight mover: rank ", n - 1, " has other layers, arrays or expert slots than rank 0"),
                 [&] { construct(last ? WeightMover<Mpi>::Params{} : peers.params()); });
  }
  construct(peers.params());
}

TEST(WeightMover, OneRankOfItsOwn) {
  moe::comm::Self<> self;
  ExpertMaps maps = random_maps(2, 3, 5, 1);
  ExpertMaps const next = random_maps(2, 3, 5, 2);
  PatternWeights weights(2, 5, 64);
  weights.load(maps, 0);
  WeightMover<moe::comm::Self<>> mover(self, weights.tensors(), 5);
  moe::eplb::SelfGroup group;
  rearrange(mover, maps, next, group, [&](int layer) { maps.set_layer(layer, next); });
  EXPECT_EQ(weights.check(next, 0), "");
  EXPECT_EQ(mover.stats().bytes_sent, 0);
}

// B16: ranks join, leave, or both; the plan's union of ranks moves the weights.
TEST(WeightMover, B16_ScaleUpAndDown) {
  Ranks ranks;
  int const n = ranks.size();
  int constexpr kSlots = 4;
  auto const scale = [&](int old_ranks, std::vector<int> const& leaving, int joining, int experts) {
    ASSERT_EQ(old_ranks + joining, n);
    Table<double> load(2, experts);
    for (int i = 0; i < experts; ++i) load(0, i) = load(1, experts - 1 - i) = 1 + i * i % 7;
    ExpertMaps const current = ExpertMaps::initial(2, experts, old_ranks * kSlots - experts);
    auto const plan = moe::eplb::plan_elastic(current, old_ranks, leaving, joining, load);
    PatternWeights weights(2, kSlots, 64);
    for (int layer = 0; layer < 2; ++layer) weights.load(layer, plan.old_map.row(layer), ranks.rank());
    WeightMover<Mpi> mover(ranks.weights, weights.tensors(), kSlots);
    for (int layer = 0; layer < 2; ++layer) {
      mover.fetch(layer, plan.old_map.row(layer), plan.new_map.row(layer));
      ranks.weights.barrier({});
      mover.commit();
      EXPECT_EQ(weights.check(layer, plan.new_map.row(layer), ranks.rank()), "");
    }
    if (std::count(leaving.begin(), leaving.end(), ranks.rank()) > 0) {
      EXPECT_EQ(mover.stats().bytes_received, 0) << "a leaving rank only sends";
    }
    if (ranks.rank() >= old_ranks) {
      EXPECT_EQ(mover.stats().bytes_sent, 0) << "a joining rank only receives";
    }
  };
  if (n == 1) GTEST_SKIP() << "one rank cannot scale";
  scale(n, {n - 1}, 0, (n - 1) * kSlots);
  scale(n - 1, {}, 1, (n - 1) * kSlots - 1);
  if (n > 2) scale(n - 1, {0}, 1, (n - 2) * kSlots);
}

TEST(WeightMover, ArraysThatCannotMove) {
  std::vector<float> data(64);
  using Strided = cuda::std::mdspan<float, cuda::std::dextents<std::int64_t, 3>, cuda::std::layout_stride>;
  Strided const transposed(data.data(), {cuda::std::dextents<std::int64_t, 3>(2, 4, 8), cuda::std::array<std::int64_t, 3>{32, 1, 4}});
  expect_error(ErrorCode::unsupported, "EPLB cannot move w13: dimension 2 has stride 4, expected 1",
               [&] { moe::eplb::expert_tensor("w13", transposed); });
  Strided const interleaved(data.data(), {cuda::std::dextents<std::int64_t, 3>(4, 2, 8), cuda::std::array<std::int64_t, 3>{8, 32, 1}});
  expect_error(ErrorCode::unsupported, "EPLB cannot move scale: dimension 1 has stride 32, expected 8",
               [&] { moe::eplb::expert_tensor("scale", interleaved); });
  expect_error(ErrorCode::unsupported, "experts are 4 elements apart, expected at least the 8 of one expert",
               [&] { moe::eplb::expert_tensor("w2", moe::make_strided_rows(data.data(), 3, 8, 4)); });
}

TEST(WeightMover, WrongCallsAndTheCallAfter) {
  Ranks ranks;
  int const n = ranks.size();
  PatternWeights weights(1, 2, 64);
  ExpertMaps const maps = ExpertMaps::initial(1, 2 * n, 0);
  ExpertMaps const next = random_maps(1, 2 * n, 2 * n, 3);
  weights.load(maps, ranks.rank());
  WeightMover<Mpi> mover(ranks.weights, weights.tensors(), 2);
  auto const before = maps.physical_to_logical().row(0);
  auto const after = next.physical_to_logical().row(0);
  expect_error(ErrorCode::state, "no layer is in the spare buffer", [&] { mover.commit(); });
  expect_error(ErrorCode::argument, "layer 1 is out of range [0, 1)", [&] { mover.fetch(1, before, after); });
  expect_error(ErrorCode::argument, text("the map has ", 2 * n - 1, " expert slots, ", n, " ranks have 2 each"),
               [&] { mover.fetch(0, before.subspan(1), after.subspan(1)); });
  mover.fetch(0, before, after);
  EXPECT_EQ(mover.fetched_layer(), 0);
  EXPECT_EQ(weights.check(maps, ranks.rank()), "") << "the weights in use stay until the commit";
  expect_error(ErrorCode::state, "layer 0 is in the spare buffer", [&] { mover.fetch(0, before, after); });
  expect_error(ErrorCode::state, "layer 0 is in the spare buffer", [&] { mover.profile(); });
  mover.discard();
  EXPECT_EQ(weights.check(maps, ranks.rank()), "");
  mover.fetch(0, before, after);
  mover.commit();
  EXPECT_EQ(weights.check(next, ranks.rank()), "");
}

// A mistake of one rank is an error on all ranks, and the communicators still work.
TEST(WeightMover, RanksThatDisagree) {
  Ranks ranks;
  int const n = ranks.size();
  if (n == 1) GTEST_SKIP() << "one rank cannot disagree";
  ExpertMaps const maps = ExpertMaps::initial(2, 2 * n, 0);
  PatternWeights good(2, 2, 64), wide(2, 2, 72);
  expect_error(ErrorCode::mismatch, text("weight mover: rank ", n - 1, " has other layers, arrays or expert slots than rank 0"),
               [&] { WeightMover<Mpi>(ranks.weights, (ranks.is_last() ? wide : good).tensors(), 2); });
  auto tensors = good.tensors();
  if (ranks.is_last()) tensors[1][2].data = nullptr;
  expect_error(ranks.is_last() ? ErrorCode::argument : ErrorCode::peer,
               ranks.is_last() ? "layer 1, array2: null" : text("construction of the weight mover failed on rank ", n - 1, " with E_ARG"),
               [&] { WeightMover<Mpi>(ranks.weights, tensors, 2); });

  good.load(maps, ranks.rank());
  WeightMover<Mpi> mover(ranks.weights, good.tensors(), 2);
  auto const never = [](int) { FAIL() << "nothing may be committed"; };
  ExpertMaps const one = random_maps(2, 2 * n, 2 * n, 1), other = random_maps(2, 2 * n, 2 * n, 2);
  expect_error(ErrorCode::mismatch, "expert maps differ",
               [&] { rearrange(mover, maps, ranks.is_last() ? other : one, ranks.group, never); });
  expect_error(ErrorCode::mismatch, "expert maps differ",
               [&] { rearrange(mover, ranks.is_last() ? other : maps, one, ranks.group, never); });
  expect_error(ranks.is_last() ? ErrorCode::argument : ErrorCode::peer,
               ranks.is_last() ? "new maps of [1, " : text("rearrangement failed on rank ", n - 1, " with E_ARG"),
               [&] { rearrange(mover, maps, ranks.is_last() ? ExpertMaps::initial(1, 2 * n, 0) : one, ranks.group, never); });
  EXPECT_EQ(good.check(maps, ranks.rank()), "");
  rearrange(mover, maps, one, ranks.group, [](int) {});
  EXPECT_EQ(good.check(one, ranks.rank()), "");
}

// A rank is missing in the second layer: all others get E_TIMEOUT that names it. The first layer is new on all ranks, the second and third
// on none.
void stays_away(bool in_window) {
  Ranks ranks(800);
  int const n = ranks.size();
  if (n == 1) GTEST_SKIP() << "one rank has no peers";
  Window const peers(ranks);
  ExpertMaps maps = ExpertMaps::initial(3, 2 * n, 0);
  Table<std::int32_t> rotated = maps.physical_to_logical();
  for (int layer = 0; layer < 3; ++layer) std::rotate(rotated.row(layer).begin(), rotated.row(layer).begin() + 2, rotated.row(layer).end());
  ExpertMaps const next(rotated, 2 * n);
  PatternWeights weights(3, 2, 64);
  weights.load(maps, ranks.rank());
  WeightMover<Mpi> mover(ranks.weights, weights.tensors(), 2, in_window ? peers.params() : WeightMover<Mpi>::Params{});
  struct Away {};
  auto const start = std::chrono::steady_clock::now();
  try {
    rearrange(mover, maps, next, ranks.group, [&](int layer) {
      maps.set_layer(layer, next);
      if (ranks.is_last()) throw Away{};
    });
    ADD_FAILURE() << "no error";
  } catch (Away const&) {
    return;
  } catch (moe::TransportError const& e) {
    EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
    EXPECT_EQ(e.peer(), n - 1) << e.what();
    EXPECT_NE(e.message().find("weights of layer 1"), std::string::npos) << e.what();
    if (!in_window &&
        ranks.rank() == n - 2) {  // each rank receives from the next one; sending a short message does not wait for its receiver
      EXPECT_NE(e.message().find(text("weights of layer 1, expert ", 2 * n - 2, " from rank ", n - 1)), std::string::npos) << e.what();
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(3 * 800 + 1500));
  EXPECT_FALSE(maps.layer_differs(0, next));
  EXPECT_TRUE(maps.layer_differs(1, next) && maps.layer_differs(2, next));
  EXPECT_EQ(weights.check(maps, ranks.rank()), "") << "the weights are those of the maps in use";
  EXPECT_EQ(mover.fetched_layer(), -1);
}
TEST(WeightMover, RankThatStaysAwayIsNamed) { stays_away(false); }
TEST(WeightMover, RankThatStaysAwayFromAWindowIsNamed) { stays_away(true); }

// B11 between processes: one rank has made one step more.
TEST(BalancerOverMpi, B11_DifferentStepsAreAMismatchOnAllRanks) {
  Ranks ranks;
  if (ranks.size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  moe::eplb::Balancer balancer({.window = 4, .step_interval = 100});
  int const model = balancer.add_model("main", ExpertMaps::initial(1, 2 * ranks.size(), 0), ranks.size());
  moe::eplb::SelfGroup alone;
  if (ranks.is_last()) balancer.step({}, alone);
  expect_error(ErrorCode::mismatch, text("ranks disagree about the EPLB step: rank 0 has 75, rank ", ranks.size() - 1, " has 76"),
               [&] { balancer.global_load(model, ranks.group); });
}

TEST(BalancerOverMpi, SumsAreExactAbove2To53) {
  Ranks ranks;
  for (std::size_t n : {0, 1, 3, 64}) {
    std::vector<std::int64_t> values(n);
    for (std::size_t i = 0; i < n; ++i) values[i] = (std::int64_t{1} << 55) + static_cast<std::int64_t>(i) + ranks.rank();
    ranks.group.all_reduce_sum(values);
    for (std::size_t i = 0; i < n; ++i) {
      EXPECT_EQ(values[i], ranks.size() * ((std::int64_t{1} << 55) + static_cast<std::int64_t>(i)) + ranks.size() * (ranks.size() - 1) / 2);
    }
  }
}

}  // namespace
