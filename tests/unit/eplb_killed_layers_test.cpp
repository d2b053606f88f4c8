// SPDX-License-Identifier: Apache-2.0
// tests/unit/eplb_killed_layers_test.cpp: runners that serve under load balancing in processes of which one is killed, in each stage: the
// survivors name it, make a new group, load its experts from the checkpoint, and serve on. Groups that grow and shrink while they serve.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <deque>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/eplb/move_elastic.hpp"
#include "moe/eplb/recovery.hpp"
#include "moe/eplb/runtime_balancer.hpp"
#include "moe/experts/reference.hpp"
#include "moe/experts/weights.hpp"
#include "moe/io/expert_loader.hpp"
#include "moe/io/layer_from_config.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/softmax_topk.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"
#include "tests/numbers.hpp"
#include "tests/unit/socket_ranks.hpp"

namespace {

using namespace moe_test;
using moe::ErrorCode;
using moe::Phase;
using moe::eplb::ExpertMaps;
using moe::eplb::MoveMode;
using moe::eplb::RuntimeStep;
using moe::eplb::Table;
using Clock = std::chrono::steady_clock;

constexpr int kHidden = 64, kIntermediate = 32, kLayers = 2, kExperts = 8, kSlots = 5;  // of tests/data/checkpoints/qwen3_moe_tiny
constexpr std::int64_t kTokens = 5;

struct Config : moe::LayerDefaults {
  static constexpr int hidden = kHidden, intermediate = kIntermediate, topk = 1;
  using Activation = moe::activation::Silu;
};
using None = moe::quantization::None;
using Store = moe::experts::WeightStore<Config, None>;
template <class Backend>
using LayerOver =
    moe::ModularKernel<Config, moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>, None, Backend, moe::experts::Reference<>>;
struct Parts : moe::RunnerDefaults {
  using Gate = moe::runner::gate::Linear<float>;
};

/// One layer of the checkpoint, opened once in each process.
class CheckpointLayer {
 public:
  CheckpointLayer(CheckpointLayer const&) = delete;
  CheckpointLayer& operator=(CheckpointLayer const&) = delete;
  explicit CheckpointLayer(int layer)
      : directory_(std::filesystem::path(MOE_TEST_DATA) / "checkpoints/qwen3_moe_tiny"),
        description_(moe::io::from_config(moe::io::HfConfig::from_file(directory_), layer)),
        tensors_(directory_),
        reader_(moe::io::LayerLoader::from_checkpoint(tensors_, description_, layer).experts()),
        loader_(tensors_, description_, reader_, quant_),
        gate_(moe::io::LayerLoader::from_checkpoint(tensors_, description_, layer)
                  .load<float>({.experts = std::vector<int>{}})
                  .router_weight) {}
  void load(int expert, Store& store, int slot) const {
    std::vector<float> w13(2 * kIntermediate * kHidden), w2(kHidden * kIntermediate);
    loader_.read(expert, {.w13 = w13.data(), .w2 = w2.data()});
    store.set_expert(slot, w13.data(), w2.data());
  }
  std::vector<float> const& gate() const { return gate_; }

 private:
  std::filesystem::path directory_;
  moe::io::LayerDescription description_;
  moe::io::TensorStore tensors_;
  moe::io::ExpertReader reader_;
  None quant_;
  moe::io::ExpertLoader<None, float> loader_;
  std::vector<float> gate_;
};
CheckpointLayer const& checkpoint(int layer) {
  static CheckpointLayer const layers[kLayers] = {CheckpointLayer(0), CheckpointLayer(1)};
  return layers[layer];
}
void load_expert(std::deque<Store>& stores, int layer, int expert, int slot) {
  checkpoint(layer).load(expert, stores[static_cast<std::size_t>(layer)], slot);
}
template <class Layer>
typename moe::Runner<Layer, Parts>::Params runner_params(int layer, moe::ExpertPlacement const& placement) {
  return {.layer = {.shape = {.num_experts = kExperts},
                    .max_tokens_per_rank = kTokens,
                    .placement = placement,
                    .router = {.num_experts = kExperts, .topk = 1}},
          .gate = {moe::make_rows(checkpoint(layer).gate().data(), kExperts, kHidden)}};
}
/// Outputs of a model of two layers, one after the other. Tokens depend on the process and the step; a common part makes experts hot.
template <class Runners, class Probe>
std::vector<float> forward(Runners& runners, int process, int step, Probe& probe) {
  std::vector<float> x = numbers(100 * step + process, kTokens * kHidden, 1.0F);
  std::vector<float> const common = numbers(5000 + step / 6, kHidden, 1.0F);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = 0.4F * x[i] + common[i % kHidden];
  std::vector<float> all;
  for (auto& runner : runners) {
    std::vector<float> out(x.size());
    runner.forward(moe::make_rows(std::as_const(x).data(), kTokens, kHidden), moe::make_rows(out.data(), kTokens, kHidden), {}, {}, probe);
    all.insert(all.end(), out.begin(), out.end());
  }
  return all;
}

/// One process's copy of the whole model.
class Oracle {
 public:
  Oracle() {
    for (int l = 0; l < kLayers; ++l) {
      stores_.emplace_back(kExperts, kHidden, kIntermediate, true);
      for (int e = 0; e < kExperts; ++e) load_expert(stores_, l, e, e);
      runners_.emplace_back(self_, stores_.back().view(), runner_params<Layer>(l, moe::ExpertPlacement(kExperts, 1)));
    }
  }
  std::vector<float> operator()(int process, int step) {
    moe::NoProbe probe;
    return forward(runners_, process, step, probe);
  }

 private:
  using Layer = LayerOver<moe::backends::NoExpertParallel<>>;
  moe::comm::Self<> self_;
  std::deque<Store> stores_;
  std::deque<moe::Runner<Layer, Parts>> runners_;
};

/// A communicator of weights whose process dies in its n-th message.
class DyingComm : public SocketComm {
 public:
  using SocketComm::SocketComm;
  int dies_in = -1;
  void all_to_all_v(void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out,
                    std::int64_t const* out_counts, std::int64_t const* out_offsets, moe::HostStream stream) {
    if (dies_in >= 0 && dies_in-- == 0) raise(SIGKILL);
    SocketComm::all_to_all_v(in, in_counts, in_offsets, out, out_counts, out_offsets, stream);
  }
};
static_assert(moe::Communicator<DyingComm>);

/// The weights that a process keeps when its group changes.
std::deque<Store> empty_stores() {
  std::deque<Store> stores;
  for (int l = 0; l < kLayers; ++l) stores.emplace_back(kSlots, kHidden, kIntermediate, true);
  return stores;
}
std::vector<moe::eplb::LayerTensors> tensors(std::deque<Store>& stores) {
  std::vector<moe::eplb::LayerTensors> out;
  for (Store& store : stores) out.push_back(moe::eplb::expert_tensors(store));
  return out;
}

using Channels = std::vector<std::unique_ptr<Sockets>>;

/// The communicators of one group: three channels each.
struct Group {
  Group(Channels& channels, int generation, std::vector<int> const& members, int process)
      : tokens(at(channels, 3 * generation), members, process, 5000),
        weights(at(channels, 3 * generation + 1), members, process, 5000),
        engine(at(channels, 3 * generation + 2), members, process, 15000),
        agreement(engine) {}
  static Sockets& at(Channels& channels, int i) { return *channels[static_cast<std::size_t>(i)]; }
  int rank() const { return engine.rank(); }
  int size() const { return engine.size(); }
  SocketComm tokens;
  DyingComm weights;
  SocketComm engine;
  moe::eplb::CommGroup<SocketComm> agreement;
};

/// One process of a group that serves.
class Member {
 public:
  Member(Group& group, std::deque<Store>& stores, ExpertMaps const& maps, MoveMode mode)
      : balancer(group.weights, group.agreement, tensors(stores),
                 {.maps = maps, .options = {.window = 2, .step_interval = 4}, .mode = mode}) {
    for (int l = 0; l < kLayers; ++l) {
      auto p = runner_params<Layer>(l, balancer.placement(l));
      p.layer.mapping = balancer.mapping(l);
      p.layer.load = balancer.load(l);
      runners_.emplace_back(group.tokens, stores[static_cast<std::size_t>(l)].view(), p);
      balancer.attach(l, runners_.back());
    }
  }
  template <class Probe>
  std::vector<float> operator()(int process, int step, Probe& probe) {
    return forward(runners_, process, step, probe);
  }
  /// Until experts have moved `moves` times. Returns the steps made; throws if an output differs from the oracle's by a bit.
  int serve(Oracle& oracle, int process, int moves, int first_step = 0) {
    moe::NoProbe probe;
    int step = first_step;
    for (int finished = 0; finished < moves; ++step) {
      if (step > first_step + 4000) throw std::runtime_error("no move came to its end");
      if ((*this)(process, step, probe) != oracle(process, step)) throw std::runtime_error(moe::text("another output in step ", step));
      finished += balancer.step().finished ? 1 : 0;
      if (balancer.pending()) std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return step;
  }

 private:
  using Layer = LayerOver<moe::backends::AllToAllV<SocketComm>>;

 public:
  moe::eplb::RuntimeBalancer<DyingComm, moe::eplb::CommGroup<SocketComm>> balancer;

 private:
  std::deque<moe::Runner<Layer, Parts>> runners_;
};

// ---- A process dies.

enum class Death { route, dispatch, experts, combine, weight_move, between_steps };

/// Dies at the start of a phase.
struct DyingProbe {
  bool armed = false;
  Phase phase = Phase::route;
  void begin(Phase p) const {
    if (armed && p == phase) raise(SIGKILL);
  }
  void end(Phase) const {}
};

constexpr int kVictim = 1;

/// Serves until `death`. Returns the maps in use and the error.
std::optional<moe::TransportError> serve_until(Death death, Member& member, Group& group, Oracle& oracle, int process, ExpertMaps& maps) {
  DyingProbe probe;
  bool const dies = process == kVictim;
  auto const deadline = Clock::now() + std::chrono::seconds(15);
  try {
    for (int step = 0; Clock::now() < deadline; ++step) {
      // Later than the first rearrangement, so that the maps are no longer the first ones.
      if (dies && step == 7) {
        if (death == Death::weight_move) group.weights.dies_in = 2;
        if (death == Death::between_steps) raise(SIGKILL);
        probe = {death < Death::weight_move, static_cast<Phase>(death)};
      }
      if (member(process, step, probe) != oracle(process, step)) throw std::runtime_error(moe::text("another output in step ", step));
      member.balancer.step();
    }
  } catch (moe::TransportError const& e) {
    maps = member.balancer.maps();
    return e;
  }
  return std::nullopt;
}

int survive(Death death, MoveMode mode, int process, Channels& channels, int processes) {
  Oracle oracle;
  std::deque<Store> stores = empty_stores();
  ExpertMaps maps = ExpertMaps::initial(kLayers, kExperts, kSlots * processes - kExperts);
  for (int l = 0; l < kLayers; ++l) {
    for (int s = 0; s < kSlots; ++s) load_expert(stores, l, maps.physical_to_logical()(l, process * kSlots + s), s);
  }
  std::vector<int> everyone(static_cast<std::size_t>(processes));
  std::iota(everyone.begin(), everyone.end(), 0);
  {
    Group group(channels, 0, everyone, process);
    Member member(group, stores, maps, mode);
    auto const began = Clock::now();
    auto const error = serve_until(death, member, group, oracle, process, maps);
    if (!error) return 2;
    if (error->peer() != kVictim) {
      std::fprintf(stderr, "process %d: %s\n", process, error->what());
      return 3;
    }
    if (Clock::now() - began > std::chrono::seconds(12)) return 4;
  }
  std::erase(everyone, kVictim);
  Group group(channels, 1, everyone, process);
  auto const recovery =
      moe::eplb::recover_held(moe::eplb::gather_held(group.agreement, group.rank(), maps, process, processes), kExperts, group.size());
  if (mode == MoveMode::pause && recovery.reloads.empty()) return 6;  // nothing would be read from the checkpoint
  moe::eplb::reload_experts(recovery, group.rank(), kSlots,
                            [&](int layer, int expert, int slot) { load_expert(stores, layer, expert, slot); });
  Member member(group, stores, recovery.maps, mode);
  member.serve(oracle, process, 3, 1000);
  return member.balancer.maps() == recovery.maps ? 5 : 0;
}

class EplbKilledLayers : public testing::TestWithParam<Death> {};
TEST_P(EplbKilledLayers, SurvivorsNameTheRankAndServeOn) {
  constexpr int kProcesses = 3;  // two survivors have 8 expert slots for 6 experts
  for (MoveMode mode : {MoveMode::pause, MoveMode::stepwise, MoveMode::background}) {
    auto const results = run_processes(
        kProcesses, 1, 6, [&](int process, Channels& channels) { return survive(GetParam(), mode, process, channels, kProcesses); });
    EXPECT_EQ(results, (std::vector<int>{0, 128 + SIGKILL, 0})) << name(mode);
  }
}
INSTANTIATE_TEST_SUITE_P(Stages, EplbKilledLayers,
                         testing::Values(Death::route, Death::dispatch, Death::experts, Death::combine, Death::weight_move,
                                         Death::between_steps));

// ---- Processes join and leave.

/// The maps and the load of the old group for all of `group`, whose rank 0 has them.
void tell_joining(Group& group, ExpertMaps& maps, Table<double>& load, int old_slots) {
  Table<std::int64_t> words(kLayers, old_slots + kExperts);
  for (int l = 0; l < kLayers && group.rank() == 0; ++l) {
    for (int s = 0; s < old_slots; ++s) words(l, s) = maps.physical_to_logical()(l, s);
    for (int e = 0; e < kExperts; ++e) words(l, old_slots + e) = static_cast<std::int64_t>(load(l, e));
  }
  group.agreement.all_reduce_sum(std::span<std::int64_t>(words.flat()));
  Table<std::int32_t> map(kLayers, old_slots);
  load = Table<double>(kLayers, kExperts);
  for (int l = 0; l < kLayers; ++l) {
    for (int s = 0; s < old_slots; ++s) map(l, s) = static_cast<std::int32_t>(words(l, s));
    for (int e = 0; e < kExperts; ++e) load(l, e) = static_cast<double>(words(l, old_slots + e));
  }
  maps = ExpertMaps(std::move(map), kExperts);
}
void scale(Group& over, std::deque<Store>& stores, moe::eplb::ElasticPlan const& plan) {
  moe::eplb::WeightMover<DyingComm> mover(over.weights, tensors(stores), kSlots);
  moe::eplb::move_elastic(mover, plan, over.agreement);
}

/// Two processes serve, then four, then three.
int grow_and_shrink(int process, Channels& channels) {
  Oracle oracle;
  std::deque<Store> stores = empty_stores();
  ExpertMaps maps;
  Table<double> load;
  if (process < 2) {
    Group two(channels, 0, {0, 1}, process);
    maps = ExpertMaps::initial(kLayers, kExperts, 2 * kSlots - kExperts);
    for (int l = 0; l < kLayers; ++l) {
      for (int s = 0; s < kSlots; ++s) load_expert(stores, l, maps.physical_to_logical()(l, process * kSlots + s), s);
    }
    Member member(two, stores, maps, MoveMode::background);
    member.serve(oracle, process, 3);
    maps = member.balancer.maps();
    load = member.balancer.global_load();
  }
  std::vector<int> all{0, 1, 2, 3};
  {
    Group four(channels, 1, all, process);
    tell_joining(four, maps, load, 2 * kSlots);
    auto const up = moe::eplb::plan_elastic(maps, 2, {}, 2, load);
    scale(four, stores, up);
    Member member(four, stores, up.maps, MoveMode::background);
    member.serve(oracle, process, 3, 2000);
    maps = member.balancer.maps();
    load = member.balancer.global_load();
    int const leaving[] = {3};
    auto const down = moe::eplb::plan_elastic(maps, 4, leaving, 0, load);
    scale(four, stores, down);
    maps = down.maps;
  }
  if (process == 3) return 0;
  Group three(channels, 2, {0, 1, 2}, process);
  Member member(three, stores, maps, MoveMode::stepwise);
  member.serve(oracle, process, 3, 3000);
  return 0;
}

TEST(EplbElasticLayers, B16_GrowAndShrinkWhileServing) { EXPECT_EQ(run_processes(4, 0, 9, grow_and_shrink), std::vector<int>(4, 0)); }

}  // namespace
