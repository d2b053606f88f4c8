// SPDX-License-Identifier: Apache-2.0
// tests/mpi/eplb_rearrangement_test.cpp: layers that keep serving while their experts move: synchronously, step by step, and with a worker
// thread (cases B9, B13, B14 and the shutdown row of docs/semantics/eplb.md §11).
#include "moe/eplb/async_rearrangement.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "expect_error.hpp"
#include "moe/activation/activation.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/eplb/balancer.hpp"
#include "moe/eplb/map_tables.hpp"
#include "moe/eplb/rearrange.hpp"
#include "moe/experts/reference.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/softmax_topk.hpp"
#include "tests/mpi/eplb_harness.hpp"
#include "tests/numbers.hpp"

int wanted_thread_level() { return MPI_THREAD_MULTIPLE; }

namespace {

using namespace moe_test;
using moe::ErrorCode;
using moe::text;
using moe::comm::Mpi;
using moe::eplb::AsyncRearrangement;
using moe::eplb::AsyncStep;
using moe::eplb::Balancer;
using moe::eplb::CommGroup;
using moe::eplb::MapTables;
using moe::eplb::WeightMover;

/// A communicator whose all-to-all starts late on this rank, and whose all-gather returns late.
class SlowMpi : public Mpi {
 public:
  using Mpi::Mpi;
  std::chrono::milliseconds delay{0}, gathers_late{0};
  void all_gather(void const* in, std::int64_t bytes, void* out, moe::HostStream stream) {
    Mpi::all_gather(in, bytes, out, stream);
    std::this_thread::sleep_for(gathers_late);
  }
  void all_to_all_v(void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out,
                    std::int64_t const* out_counts, std::int64_t const* out_offsets, moe::HostStream stream) {
    std::this_thread::sleep_for(delay);
    Mpi::all_to_all_v(in, in_counts, in_offsets, out, out_counts, out_offsets, stream);
  }
};
static_assert(moe::Communicator<SlowMpi>);

/// Communicators of one test: weights move over one, layers and engine agree over the others.
struct Ranks {
  explicit Ranks(std::int64_t weights_ms = 20'000)
      : weights(MPI_COMM_WORLD, {.timeout_ms = weights_ms}),
        tokens(MPI_COMM_WORLD, {.timeout_ms = 20'000}),
        engine(MPI_COMM_WORLD, {.timeout_ms = 2 * weights_ms}),
        group(engine) {}
  int rank() const { return engine.rank(); }
  int size() const { return engine.size(); }
  int last() const { return size() - 1; }
  bool is_last() const { return rank() == last(); }
  SlowMpi weights;
  Mpi tokens, engine;
  CommGroup<Mpi> group;
};

// ---- Layers that serve.

struct Config : moe::LayerDefaults {
  static constexpr int hidden = 16, intermediate = 8;
  using Activation = moe::activation::Silu;
};
using None = moe::quantization::None;
using Layer = moe::ModularKernel<Config, moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>, None, moe::backends::AllToAllV<Mpi>,
                                 moe::experts::Reference<>>;
using Store = moe::experts::WeightStore<Config, None>;
constexpr int kLayers = 3;
constexpr int kSlots = 3;  // a rank
constexpr std::int64_t kTokens = 12;

void load_expert(Store& store, int slot, int layer, int expert) {
  int const seed = 1000 * layer + 10 * expert;
  store.set_expert(slot, numbers(seed, 2 * 8 * 16, 1.0F).data(), numbers(seed + 1, 16 * 8, 1.0F).data());
  store.set_bias(slot, numbers(seed + 2, 16, 1.0F).data(), numbers(seed + 3, 16, 1.0F).data());
}
void load_experts(Store& store, int layer, ExpertMaps const& maps, int rank) {
  for (int s = 0; s < kSlots; ++s) load_expert(store, s, layer, maps.physical_to_logical()(layer, rank * kSlots + s));
}
std::vector<unsigned char> bytes_of(Store& store) {
  std::vector<unsigned char> out;
  for (auto const& t : moe::eplb::expert_tensors(store)) {
    auto const* p = reinterpret_cast<unsigned char const*>(t.data);
    out.insert(out.end(), p, p + t.slots * t.stride);
  }
  return out;
}

/// A model of three layers on this rank, its tables, and the same tokens in every step. Some experts are much hotter than others.
class Model {
 public:
  Model(Ranks& ranks, int topk, moe::eplb::BalancerOptions const& options = {.window = 4, .step_interval = 4})
      : ranks_(ranks), num_experts_(2 * ranks.size() + 1), balancer(options), topk_(topk) {
    ExpertMaps const maps = ExpertMaps::initial(kLayers, num_experts_, kSlots * ranks.size() - num_experts_);
    tables_ = std::make_unique<MapTables<>>(maps);
    balancer.add_model("main", maps, ranks.size());
    auto const row = maps.physical_to_logical().row(0);
    for (int l = 0; l < kLayers; ++l) {
      stores_.emplace_back(kSlots, 16, 8, true);
      load_experts(stores_.back(), l, maps, ranks.rank());
      layers_.emplace_back(ranks.tokens, stores_.back().view(),
                           Layer::Params{.shape = {.num_experts = num_experts_, .topk = topk},
                                         .max_tokens_per_rank = kTokens,
                                         .placement = moe::ExpertPlacement::from_physical_to_logical(row, num_experts_, ranks.size()),
                                         .router = {.num_experts = num_experts_, .topk = topk},
                                         .mapping = tables_->mapping(l, ranks.rank(), ranks.size()),
                                         .load = {tables_->load_counter(l)}});
    }
  }

  std::vector<moe::eplb::LayerTensors> tensors() {
    std::vector<moe::eplb::LayerTensors> out;
    for (Store& store : stores_) out.push_back(moe::eplb::expert_tensors(store));
    return out;
  }
  /// Outputs of all layers, [layers · T · H], and one engine step of counting.
  std::vector<float> forward() {
    int const seed = 77 + ranks_.rank();
    std::vector<float> const x = numbers(seed, kTokens * 16, 1.0F);
    std::vector<float> all;
    for (int l = 0; l < kLayers; ++l) {
      std::vector<float> logits = numbers(seed + 100 + l, kTokens * num_experts_, 1.0F);
      for (std::size_t i = 0; i < logits.size(); ++i) {
        if (static_cast<int>(i) % num_experts_ == (l + 1) % num_experts_) logits[i] += 1.5F;  // the layer's hot expert
      }
      std::vector<float> out(x.size());
      layers_[static_cast<std::size_t>(l)].forward(moe::make_rows<16>(x.data(), kTokens, 16),
                                                   moe::make_rows(std::as_const(logits).data(), kTokens, num_experts_),
                                                   moe::make_rows<16>(out.data(), kTokens, 16));
      all.insert(all.end(), out.begin(), out.end());
    }
    tables_->take_load(balancer.load_pass(0));
    return all;
  }
  /// Switches one layer of the maps in use to `next`: the commit callback of a rearrangement.
  void commit(int layer, ExpertMaps const& next) {
    balancer.commit_layer(0, layer, next);
    tables_->publish(layer, next);
  }
  ExpertMaps const& maps() const { return balancer.maps(0); }
  /// Every expert slot of every layer holds its expert's bytes.
  void expect_weights_of_maps(std::string const& when) {
    Store fresh(kSlots, 16, 8, true);
    for (int l = 0; l < kLayers; ++l) {
      load_experts(fresh, l, maps(), ranks_.rank());
      EXPECT_EQ(bytes_of(fresh), bytes_of(stores_[static_cast<std::size_t>(l)])) << when << ", layer " << l;
    }
  }
  int topk() const { return topk_; }

 private:
  Ranks& ranks_;
  int num_experts_;

 public:
  Balancer balancer;

 private:
  int topk_;
  std::unique_ptr<MapTables<>> tables_;
  std::deque<Store> stores_;
  std::deque<Layer> layers_;
};

/// With one expert per token a map cannot change a bit; with two, the sum over ranks is rounded in another order.
void expect_same(Model const& model, std::vector<float> const& got, std::vector<float> const& first, std::string const& when) {
  ASSERT_EQ(got.size(), first.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (model.topk() == 1) {
      ASSERT_EQ(got[i], first[i]) << when << ", value " << i;
    } else {
      ASSERT_NEAR(got[i], first[i], 2e-6) << when << ", value " << i;
    }
  }
}

/// The same on every rank, or a failure on all.
void expect_agreed(Ranks& ranks, std::vector<int> const& mine, char const* what) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (int v : mine) hash = (hash ^ static_cast<std::uint64_t>(static_cast<unsigned>(v))) * 1099511628211ULL;
  auto const all = ranks.group.all_gather(hash);
  EXPECT_EQ(std::count(all.begin(), all.end(), all[0]), static_cast<std::ptrdiff_t>(all.size())) << what << " differs between ranks";
}

TEST(Rearrangement, B9_SynchronousBetweenForwards) {
  Ranks ranks;
  for (int topk : {1, 2}) {
    Model model(ranks, topk);
    WeightMover<SlowMpi> mover(ranks.weights, model.tensors(), kSlots);
    auto const first = model.forward();
    int rearranged = 0;
    for (int step = 0; step < 9; ++step) {
      if (model.balancer.step({}, ranks.group).rearrange) {
        auto const proposal = model.balancer.propose(0, {.num_ranks = ranks.size()}, ranks.group);
        auto const report =
            moe::eplb::rearrange(mover, model.maps(), proposal.maps, ranks.group, [&](int layer) { model.commit(layer, proposal.maps); });
        EXPECT_EQ(model.maps(), proposal.maps);
        EXPECT_LE(report.moved.slots_changed, proposal.moved_slots);
        rearranged += report.layers_changed;
        model.expect_weights_of_maps(text("after step ", step));
      }
      expect_same(model, model.forward(), first, text("step ", step));
    }
    if (ranks.size() > 1) {
      EXPECT_GT(rearranged, 0);
      EXPECT_NE(model.maps(), ExpertMaps::initial(kLayers, model.maps().num_logical(), model.maps().num_redundant()));
    }
    // Invariant 8: the window's sums are the slots that all ranks routed in its four steps.
    auto const load = model.balancer.global_load(0, ranks.group);
    for (int l = 0; l < kLayers; ++l) {
      EXPECT_EQ(std::accumulate(load.row(l).begin(), load.row(l).end(), 0.0), 4.0 * topk * kTokens * ranks.size());
    }
  }
}

void serve_while_moving(Ranks& ranks, int topk, bool background) {
  Model model(ranks, topk);
  WeightMover<SlowMpi> mover(ranks.weights, model.tensors(), kSlots);
  AsyncRearrangement<SlowMpi> async(mover, {.background = background});
  auto const first = model.forward();
  std::vector<int> log;  // the events of each step
  int finished = 0;
  for (int step = 0; step < 2000 && finished < 2; ++step) {
    auto const outcome = model.balancer.step({.rearranging = async.pending()}, ranks.group);
    if (outcome.rearrange) {
      auto load = model.balancer.global_load(0, ranks.group);
      if (finished == 1) std::reverse(load.flat().begin(), load.flat().end());  // so that the second one moves weights too
      async.begin(model.maps(),
                  [maps = model.maps(), load, n = ranks.size()] { return moe::eplb::propose(maps, load, {.num_ranks = n}).maps; });
    }
    expect_same(model, model.forward(), first, text("step ", step));
    AsyncStep const done = async.step(ranks.group, [&](int layer, ExpertMaps const& next) { model.commit(layer, next); });
    if (done.committed_layer >= 0) model.expect_weights_of_maps(text("after step ", step));
    finished += done.finished ? 1 : 0;
    if (outcome.rearrange || done != AsyncStep{}) log.insert(log.end(), {step, outcome.rearrange, done.committed_layer, done.finished});
    if (!background) {
      EXPECT_TRUE(!async.pending() || done.committed_layer >= 0) << "a layer a step";
    }
    if (async.pending()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(finished, 2);
  EXPECT_FALSE(async.pending());
  expect_agreed(ranks, log, "the steps of the commits");
  expect_same(model, model.forward(), first, "at the end");
  if (ranks.size() > 1) {
    EXPECT_GT(mover.stats().slots_changed, 0);
  }
}

TEST(Rearrangement, B9_OneLayerAStepInsideTheSteps) {
  Ranks ranks;
  for (int topk : {1, 2}) serve_while_moving(ranks, topk, false);
}

TEST(Rearrangement, B9_BesideAWorkerThread) {
  Ranks ranks;
  for (int topk : {1, 2}) serve_while_moving(ranks, topk, true);
}

// ---- Failures, over weights without layers.

/// Maps in which rank r's next experts are those of rank r + 1, in every layer.
ExpertMaps rotated(ExpertMaps const& maps) {
  Table<std::int32_t> map = maps.physical_to_logical();
  for (int l = 0; l < map.rows(); ++l) std::rotate(map.row(l).begin(), map.row(l).begin() + kSlots, map.row(l).end());
  return ExpertMaps(map, maps.num_logical());
}

struct Moving {
  explicit Moving(Ranks& ranks) : maps(ExpertMaps::initial(kLayers, kSlots * ranks.size(), 0)), weights(kLayers, kSlots, 64) {
    next = rotated(maps);
    weights.load(maps, ranks.rank());
  }
  ExpertMaps maps, next;
  PatternWeights weights;
  std::function<void(int, ExpertMaps const&)> commit = [this](int layer, ExpertMaps const& to) { maps.set_layer(layer, to); };
};

TEST(AsyncRearrangement, B13_CommitsInTheSameStepThoughOneRankIsSlow) {
  Ranks ranks;
  if (ranks.size() == 1) GTEST_SKIP() << "one rank is alone";
  Moving m(ranks);
  WeightMover<SlowMpi> mover(ranks.weights, m.weights.tensors(), kSlots);
  if (ranks.rank() == 1) ranks.weights.delay = std::chrono::milliseconds(4);  // of 15 messages a layer
  AsyncRearrangement<SlowMpi> async(mover);
  async.begin(m.maps, [next = m.next] { return next; });
  expect_error(ErrorCode::state, "a rearrangement is pending already", [&] { async.begin(m.maps, [] { return ExpertMaps(); }); });
  std::vector<int> committed, steps;
  int idle = 0;
  for (int step = 0; async.pending(); ++step) {
    ASSERT_LT(step, 5000);
    AsyncStep const done = async.step(ranks.group, m.commit);
    EXPECT_EQ(m.weights.check(m.maps, ranks.rank()), "") << "step " << step << ": maps and weights belong together";
    if (done.committed_layer >= 0) {
      committed.push_back(done.committed_layer);
      steps.push_back(step);
    } else {
      ++idle;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  EXPECT_EQ(committed, (std::vector<int>{0, 1, 2}));
  EXPECT_GT(idle, 3) << "the fast ranks waited for the slow one";
  expect_agreed(ranks, steps, "the steps of the commits");
  EXPECT_EQ(m.maps, m.next);
}

TEST(AsyncRearrangement, EqualMapsFinishWithoutACommit) {
  Ranks ranks;
  Moving m(ranks);
  WeightMover<SlowMpi> mover(ranks.weights, m.weights.tensors(), kSlots);
  for (bool background : {false, true}) {
    AsyncRearrangement<SlowMpi> async(mover, {.background = background});
    EXPECT_EQ(async.step(ranks.group, m.commit), AsyncStep{}) << "nothing is pending";
    async.begin(m.maps, [maps = m.maps] { return maps; });
    bool finished = false;
    for (int step = 0; step < 5000 && !finished; ++step) {
      AsyncStep const done = async.step(ranks.group, m.commit);
      EXPECT_EQ(done.committed_layer, -1);
      finished = done.finished;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(finished && !async.pending() && !async.disabled());
  }
}

/// Steps until one throws, in the same step on every rank. Returns the error; balancing is off, and maps and weights are unchanged.
moe::Error failing_steps(Ranks& ranks, Moving& m, AsyncRearrangement<SlowMpi>& async) {
  ExpertMaps const before = m.maps;
  for (int step = 0; step < 5000; ++step) {
    try {
      async.step(ranks.group, m.commit);
    } catch (moe::Error const& e) {
      EXPECT_TRUE(async.disabled());
      EXPECT_FALSE(async.pending());
      EXPECT_EQ(m.maps, before) << "the last good map stays";
      EXPECT_EQ(m.weights.check(before, ranks.rank()), "");
      EXPECT_EQ(async.step(ranks.group, m.commit), AsyncStep{}) << "steps go on without balancing";
      expect_error(ErrorCode::state, "off after a failure", [&] { async.begin(m.maps, [&] { return m.maps; }); });
      expect_agreed(ranks, {step}, "the step of the error");
      return e;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  ADD_FAILURE() << "no error";
  return moe::Error(ErrorCode::internal, "");
}

void expect_failure_of_last_rank(Ranks& ranks, bool background) {
  Moving m(ranks);
  WeightMover<SlowMpi> mover(ranks.weights, m.weights.tensors(), kSlots);
  AsyncRearrangement<SlowMpi> async(mover, {.background = background});
  async.begin(m.maps, [next = m.next, fails = ranks.is_last()] {
    if (fails) throw moe::Error(ErrorCode::argument, "load of expert 3 in layer 1 must be finite");
    return next;
  });
  moe::Error const e = failing_steps(ranks, m, async);
  EXPECT_EQ(e.code(), ranks.is_last() ? ErrorCode::argument : ErrorCode::peer) << e.what();
  EXPECT_NE(e.message().find(ranks.is_last() ? "load of expert 3" : text("rank ", ranks.last())), std::string::npos) << e.what();
}

TEST(AsyncRearrangement, B14_ExceptionInAWorkerIsReportedInTheNextStepOnAllRanks) {
  for (bool background : {false, true}) {
    Ranks ranks;
    expect_failure_of_last_rank(ranks, background);
  }
}

// An exception at the start of the thread is a failure like any other, and the other workers do not wait for this one.
TEST(AsyncRearrangement, B14_ExceptionAtTheStartOfAWorker) {
  Ranks ranks;
  Moving m(ranks);
  WeightMover<SlowMpi> mover(ranks.weights, m.weights.tensors(), kSlots);
  AsyncRearrangement<SlowMpi> async(mover, {.on_thread_start = [fails = ranks.is_last()] {
                                      if (fails) throw moe::Error(ErrorCode::config, "no such device");
                                    }});
  async.begin(m.maps, [next = m.next] { return next; });
  moe::Error const e = failing_steps(ranks, m, async);
  EXPECT_EQ(e.code(), ranks.is_last() ? ErrorCode::config : ErrorCode::peer) << e.what();
  EXPECT_NE(e.message().find(ranks.is_last() ? "no such device" : text("rank ", ranks.last())), std::string::npos) << e.what();
}

// The other workers learn of the failure and fail while the first failed rank is still reporting it.
TEST(AsyncRearrangement, B14_ReportsTheRankThatFailedThoughAPeerReportsFirst) {
  Ranks ranks;
  if (ranks.is_last()) ranks.weights.gathers_late = std::chrono::milliseconds(50);
  expect_failure_of_last_rank(ranks, true);
}

TEST(AsyncRearrangement, B14_RanksThatPlanDifferently) {
  Ranks ranks;
  if (ranks.size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  Moving m(ranks);
  WeightMover<SlowMpi> mover(ranks.weights, m.weights.tensors(), kSlots);
  AsyncRearrangement<SlowMpi> async(mover);
  async.begin(m.maps, [next = ranks.is_last() ? rotated(m.next) : m.next] { return next; });
  moe::Error const e = failing_steps(ranks, m, async);
  EXPECT_TRUE(e.code() == ErrorCode::mismatch || e.code() == ErrorCode::peer) << e.what();
}

// One rank's worker misses the deadline of the weights' communicator.
TEST(AsyncRearrangement, B14_TransferDeadlineNamesLayerExpertAndPeer) {
  Ranks ranks(400);
  if (ranks.size() == 1) GTEST_SKIP() << "one rank has no peers";
  if (ranks.rank() != ranks.last() - 1) ranks.weights.set_timeout_ms(10'000);  // only the rank that waits for the weights times out
  Moving m(ranks);
  WeightMover<SlowMpi> mover(ranks.weights, m.weights.tensors(), kSlots);
  if (ranks.is_last()) ranks.weights.delay = std::chrono::milliseconds(1000);
  AsyncRearrangement<SlowMpi> async(mover);
  async.begin(m.maps, [next = m.next] { return next; });
  moe::Error const e = failing_steps(ranks, m, async);
  if (ranks.rank() == ranks.last() - 1) {
    EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
    std::string const where = text("weights of layer 0, expert ", kSlots * ranks.last(), " from rank ", ranks.last());
    EXPECT_NE(e.message().find(where), std::string::npos) << e.what();
  } else {
    EXPECT_EQ(e.code(), ErrorCode::peer) << e.what();
    EXPECT_NE(e.message().find(text("rank ", ranks.last() - 1)), std::string::npos) << e.what();
  }
}

// No communicator's deadline passes, but the layer is not ready everywhere in time.
TEST(AsyncRearrangement, B14_RankThatIsNeverReadyIsNamedOnAllRanks) {
  Ranks ranks;
  Moving m(ranks);
  WeightMover<SlowMpi> mover(ranks.weights, m.weights.tensors(), kSlots);
  ranks.weights.delay = std::chrono::milliseconds(ranks.is_last() ? 60 : 0);
  if (ranks.size() == 1) GTEST_SKIP() << "one rank has no peers";
  AsyncRearrangement<SlowMpi> async(mover, {.timeout_ms = 150});
  async.begin(m.maps, [next = m.next] { return next; });
  moe::Error const e = failing_steps(ranks, m, async);
  EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
  EXPECT_NE(e.message().find(text(ranks.last(), " not ready within 150 ms")), std::string::npos) << e.what();
}

// A rank stops stepping, as a dead one would: the others detect it in the step's agreement.
TEST(AsyncRearrangement, B14_RankThatLeavesIsNamed) {
  Ranks ranks(800);
  if (ranks.size() == 1) GTEST_SKIP() << "one rank has no peers";
  Moving m(ranks);
  WeightMover<SlowMpi> mover(ranks.weights, m.weights.tensors(), kSlots);
  AsyncRearrangement<SlowMpi> async(mover);
  async.begin(m.maps, [next = m.next] { return next; });
  int commits = 0;
  auto const start = std::chrono::steady_clock::now();
  try {
    for (int step = 0; step < 5000; ++step) {
      if (async.step(ranks.group, m.commit).committed_layer >= 0 && ++commits == 1 && ranks.is_last()) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    ADD_FAILURE() << "no error";
  } catch (moe::TransportError const& e) {
    EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
    EXPECT_EQ(e.peer(), ranks.last()) << e.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(5000));
  EXPECT_EQ(commits, 1);
  EXPECT_EQ(m.weights.check(m.maps, ranks.rank()), "") << "one layer new, the others old, each with its weights";
}

// The object is destroyed in the middle: the layer in flight is abandoned, and no layer is half replaced.
TEST(AsyncRearrangement, ShutdownWhilePendingLeavesMapsAndWeightsTogether) {
  Ranks ranks;
  if (ranks.size() == 1) GTEST_SKIP() << "one rank has nothing to move";
  for (int commits_before : {0, 1, 2}) {
    Moving m(ranks);
    WeightMover<SlowMpi> mover(ranks.weights, m.weights.tensors(), kSlots);
    auto const start = std::chrono::steady_clock::now();
    {
      AsyncRearrangement<SlowMpi> async(mover);
      async.begin(m.maps, [next = m.next] { return next; });
      for (int commits = 0; commits < commits_before;) {
        if (async.step(ranks.group, m.commit).committed_layer >= 0) ++commits;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5)) << "no rank waits for a worker that left";
    EXPECT_EQ(mover.fetched_layer(), -1);
    EXPECT_EQ(m.weights.check(m.maps, ranks.rank()), "");
    for (int l = 0; l < kLayers; ++l) EXPECT_EQ(m.maps.layer_differs(l, m.next), l >= commits_before);
    // The communicators are intact: the rest can be moved synchronously.
    moe::eplb::rearrange(mover, m.maps, m.next, ranks.group, [&](int layer) { m.maps.set_layer(layer, m.next); });
    EXPECT_EQ(m.weights.check(m.next, ranks.rank()), "");
  }
}

}  // namespace
