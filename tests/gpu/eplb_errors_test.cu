// SPDX-License-Identifier: Apache-2.0
// tests/gpu/eplb_errors_test.cu: the errors of docs/semantics/eplb.md §11 in the CUDA space, row by row: counters, maps and weights in
// device memory. The rows on maps and files have no test here (tests/unit/).
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "moe/comm/self.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/eplb/runtime_balancer.hpp"
#include "tests/expect_error.hpp"

namespace {

using namespace moe;
using moe_test::expect_error;
using Cuda = space::cuda;
using eplb::BalancerOptions;
using eplb::ExpertMaps;
using eplb::MoveMode;
constexpr int kLayers = 3, kExperts = 5, kSlots = 7;
constexpr std::int64_t kBytes = 32;

/// The weights of every expert slot of every layer: kBytes times the number of layer and expert.
class SlotWeights {
 public:
  SlotWeights(int layers, int slots) : slots_(slots) {
    for (int l = 0; l < layers; ++l) arrays_.emplace_back(slots * kBytes);
  }
  static std::byte value(int layer, int expert) { return static_cast<std::byte>(16 * layer + expert + 1); }
  void load(ExpertMaps const& maps, int first) {
    for (int l = 0; Buffer<std::byte, Cuda>& array : arrays_) {
      for (int s = 0; s < slots_; ++s) {
        Memory<Cuda>::fill(array.data() + s * kBytes, static_cast<int>(value(l, maps.physical_to_logical()(l, first + s))), kBytes);
      }
      ++l;
    }
  }
  /// Whether every expert slot holds its expert.
  bool follow(ExpertMaps const& maps, int first) const {
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (int l = 0; Buffer<std::byte, Cuda> const& array : arrays_) {
      std::vector<std::byte> bytes(static_cast<std::size_t>(array.size()));
      array.copy_to_host(bytes.data());
      for (std::size_t i = 0; i < bytes.size(); ++i) {
        int const slot = static_cast<int>(i) / static_cast<int>(kBytes);
        if (bytes[i] != value(l, maps.physical_to_logical()(l, first + slot))) return false;
      }
      ++l;
    }
    return true;
  }
  std::vector<eplb::LayerTensors> tensors() {
    std::vector<eplb::LayerTensors> out;
    for (auto& array : arrays_) out.push_back({{"w13", array.data(), slots_, kBytes, kBytes}});
    return out;
  }

 private:
  int slots_;
  std::list<Buffer<std::byte, Cuda>> arrays_;
};

struct CountsChanges {
  int changed = 0;
  void weights_changed(cudaStream_t) { ++changed; }
};
template <class Balancer>
void set_load(Balancer& balancer, int layer, std::vector<std::int32_t> const& counts) {
  Memory<Cuda>::copy_from_host(balancer.load(layer).load_counter, counts.data(), counts.size() * sizeof(std::int32_t));
}

/// One rank whose experts move between its expert slots.
struct OneRankModel {
  explicit OneRankModel(MoveMode mode)
      : maps(ExpertMaps::initial(kLayers, kExperts, kSlots - kExperts)),
        weights(kLayers, kSlots),
        balancer(self, group, weights.tensors(),
                 {.maps = maps, .options = {.window = 2, .step_interval = 2}, .mode = mode, .worker_stream = worker}) {
    weights.load(maps, 0);
  }
  void attach() {
    for (int l = 0; l < kLayers; ++l) balancer.attach(l, layers[l]);
  }
  /// Every expert gets tokens, expert 4 many.
  void count() {
    for (int l = 0; l < kLayers; ++l) {
      std::vector<std::int32_t> counts(kSlots, 1);
      for (int s = 0; s < kSlots; ++s) {
        if (balancer.maps().physical_to_logical()(l, s) == 4) counts[static_cast<std::size_t>(s)] = 100;
      }
      set_load(balancer, l, counts);
    }
  }
  comm::Self<Cuda> self;
  eplb::SelfGroup group;
  CudaStream worker;
  ExpertMaps maps;
  SlotWeights weights;
  eplb::RuntimeBalancer<comm::Self<Cuda>, eplb::SelfGroup> balancer;
  CountsChanges layers[kLayers];
};

/// Rank 0 of two, whose peer answers alike, but for `other_bytes` bytes of `other_byte` in one call; it never sends weights.
struct TwoRanks : comm::Self<Cuda> {
  int size() const { return 2; }
  void all_gather(void const* in, std::int64_t n, void* out, cudaStream_t stream) {
    for (int r = 0; r < 2; ++r) Memory<Cuda>::copy_async(static_cast<char*>(out) + r * n, in, static_cast<std::size_t>(n), stream);
    if (calls++ == other_call) Memory<Cuda>::fill_async(static_cast<char*>(out) + n, other_byte, other_bytes, stream);
  }
  int calls = 0, other_call = -1, other_byte = 0;
  std::size_t other_bytes = 0;
  void all_to_all_v(void const*, std::int64_t const*, std::int64_t const*, void*, std::int64_t const*, std::int64_t const*, cudaStream_t) {
    throw TransportError(ErrorCode::timeout, 0, 1, "exchange", 7, "not there within 20 ms");
  }
};
static_assert(Communicator<TwoRanks>);
struct TwoRankGroup {
  std::uint64_t differs = 0;
  static constexpr int size() { return 2; }
  static void all_reduce_sum(std::span<std::int64_t>) {}
  std::vector<std::uint64_t> all_gather(std::uint64_t word) const { return {word, word + differs}; }
};
using TwoRankBalancer = eplb::RuntimeBalancer<TwoRanks, TwoRankGroup>;

TEST(EplbErrorsOnTheDevice, Sizes) {
  TwoRanks comm;
  TwoRankGroup group;
  SlotWeights weights(kLayers, 4);
  auto const make = [&](int slots, BalancerOptions const& options) {
    TwoRankBalancer(comm, group, weights.tensors(),
                    {.maps = ExpertMaps::initial(kLayers, kExperts, slots - kExperts), .options = options, .mode = MoveMode::pause});
  };
  expect_error(ErrorCode::config, "P must be divisible by ep_size: P = 7, ep_size = 2", [&] { make(7, {}); });
  expect_error(ErrorCode::config, "num_redundant", [&] { make(4, {}); });
  expect_error(ErrorCode::config, "eplb window must be greater than 0, is 0", [&] { make(8, {.window = 0}); });
  expect_error(ErrorCode::config, "eplb step_interval must be greater than 0, is -1", [&] { make(8, {.step_interval = -1}); });
}

TEST(EplbErrorsOnTheDevice, NoLayerIsAttached) {
  OneRankModel m(MoveMode::pause);
  expect_error(ErrorCode::state, "no layer is attached to the weights of layer 0", [&] { m.balancer.step(); });
}

// The count of a step is read with the next one.
TEST(EplbErrorsOnTheDevice, LoadThatIsNotANumber) {
  OneRankModel m(MoveMode::pause);
  m.attach();
  std::vector<std::int32_t> counts(kSlots, 1);
  counts[4] = -3;
  set_load(m.balancer, 1, counts);
  expect_error(ErrorCode::argument, "load of physical expert 4 in layer 1 must be at least 0, is -3", [&] {
    m.balancer.step();
    m.balancer.step();
  });
}

TEST(EplbErrorsOnTheDevice, RanksThatDiffer) {
  TwoRanks comm;
  TwoRankGroup group;
  SlotWeights weights(1, 3);
  ExpertMaps const maps = ExpertMaps::initial(1, 4, 2);
  TwoRankBalancer balancer(comm, group, weights.tensors(), {.maps = maps, .options = {.step_interval = 1}, .mode = MoveMode::pause});
  CountsChanges layer;
  balancer.attach(0, layer);
  group.differs = 1;
  expect_error(ErrorCode::mismatch, "ranks disagree about the EPLB step: rank 0 has 0, rank 1 has 1", [&] { balancer.step(); });
  EXPECT_TRUE(balancer.disabled());
  EXPECT_EQ(balancer.maps(), maps);
}

TEST(EplbErrorsOnTheDevice, ShutdownWhileAMoveIsPending) {
  for (MoveMode mode : {MoveMode::stepwise, MoveMode::background}) {
    OneRankModel m(mode);
    m.attach();
    int commits = 0;
    for (int step = 0; step < 100'000 && commits == 0; ++step) {
      m.count();
      commits += static_cast<int>(m.balancer.step().committed_layers.size());
    }
    ASSERT_GT(commits, 0) << name(mode);
    m.balancer.stop();
    EXPECT_FALSE(m.balancer.pending());
    EXPECT_TRUE(m.weights.follow(m.balancer.maps(), 0)) << "committed layers are new, the others old";
    EXPECT_NE(m.balancer.maps(), m.maps);
  }
}

TEST(EplbErrorsOnTheDevice, ArraysThatCannotMove) {
  Buffer<float, Cuda> data(64);
  using Extents = cuda::std::dextents<std::int64_t, 3>;
  cuda::std::mdspan<float, Extents, cuda::std::layout_stride> const view(
      data.data(), cuda::std::layout_stride::mapping<Extents>(Extents(2, 4, 4), cuda::std::array<std::int64_t, 3>{32, 2, 8}));
  expect_error(ErrorCode::unsupported, "EPLB cannot move w13: dimension 2 has stride 8, expected 1",
               [&] { eplb::expert_tensor("w13", view); });
  comm::Self<Cuda> self;
  eplb::SelfGroup group;
  auto const make = [&](eplb::ExpertTensor const& tensor) {
    eplb::RuntimeBalancer<comm::Self<Cuda>, eplb::SelfGroup>(self, group, {{tensor}},
                                                             {.maps = ExpertMaps::initial(1, 2, 0), .mode = MoveMode::pause});
  };
  expect_error(ErrorCode::argument, "layer 0, w2: null, 2 expert slots of 8 bytes", [&] { make({"w2", nullptr, 2, 8, 8}); });
  expect_error(ErrorCode::argument, "layer 0, w2: 1 expert slots of 8 bytes, 8 apart; 2 expert slots are needed",
               [&] { make({"w2", reinterpret_cast<std::byte*>(data.data()), 1, 8, 8}); });
}

/// A call on weights that move: refused, and the move goes on.
TEST(EplbErrorsOnTheDevice, WrongCallsWhileWeightsMove) {
  for (MoveMode mode : {MoveMode::stepwise, MoveMode::background}) {
    OneRankModel m(mode);
    m.attach();
    for (int step = 0; step < 100 && !m.balancer.pending(); ++step) {
      m.count();
      m.balancer.step();
    }
    ASSERT_TRUE(m.balancer.pending()) << name(mode);
    expect_error(ErrorCode::state, "a rearrangement is pending already", [&] { m.balancer.move_to(m.maps); });
    EXPECT_FALSE(m.balancer.disabled());
    m.balancer.stop();
    expect_error(ErrorCode::argument, "new maps of [3, 8]",
                 [&] { m.balancer.move_to(ExpertMaps::initial(kLayers, kExperts, kSlots + 1 - kExperts)); });
    EXPECT_TRUE(m.balancer.disabled());
    EXPECT_TRUE(m.weights.follow(m.balancer.maps(), 0));
    m.count();
    EXPECT_FALSE(m.balancer.step().triggered) << "steps go on";
  }
  comm::Self<Cuda> self;
  ExpertMaps const maps = ExpertMaps::initial(1, 3, 0), next(eplb::Table<std::int32_t>({{2, 0, 1}}), 3);
  auto const before = maps.physical_to_logical().row(0), after = next.physical_to_logical().row(0);
  SlotWeights weights(1, 3);
  weights.load(maps, 0);
  eplb::WeightMover<comm::Self<Cuda>> mover(self, weights.tensors(), 3);
  expect_error(ErrorCode::state, "no layer is in the spare buffer", [&] { mover.commit(); });
  mover.fetch(0, before, after);
  EXPECT_TRUE(weights.follow(maps, 0)) << "the weights in use stay until the commit";
  expect_error(ErrorCode::state, "layer 0 is in the spare buffer", [&] { mover.fetch(0, before, after); });
  expect_error(ErrorCode::state, "layer 0 is in the spare buffer", [&] { mover.profile(); });
  mover.discard();
  EXPECT_TRUE(weights.follow(maps, 0));
  mover.fetch(0, before, after);
  mover.commit();
  EXPECT_TRUE(weights.follow(next, 0));
}

TEST(EplbErrorsOnTheDevice, WindowsThatDoNotFit) {
  SlotWeights weights(1, 3);
  Buffer<std::byte, Cuda> part(768), of_peer(768);
  using Mover = eplb::WeightMover<TwoRanks>;
  auto const construct = [&](TwoRanks comm, eplb::PeerBuffers const& peers) { Mover(comm, weights.tensors(), 3, {.peers = peers}); };
  construct({}, {{part.data(), of_peer.data()}, 768});
  expect_error(ErrorCode::capacity, "peers: the window has 767 bytes a rank, one layer's experts need 768",
               [&] { construct({}, {{part.data(), of_peer.data()}, 767}); });
  expect_error(ErrorCode::argument, "peers: a window of 1 ranks, the communicator has 2", [&] { construct({}, {{part.data()}, 768}); });
  expect_error(ErrorCode::argument, "peers: a part is null", [&] { construct({}, {{part.data(), nullptr}, 768}); });

  // The peer has refused its window; the peer has none.
  TwoRanks refuses, differs;
  refuses.other_call = 0;
  refuses.other_byte = 1 + static_cast<int>(ErrorCode::capacity);
  refuses.other_bytes = 1;
  expect_error(ErrorCode::peer, "construction of the weight mover failed on rank 1 with E_CAPACITY",
               [&] { construct(refuses, {{part.data(), of_peer.data()}, 768}); });
  differs.other_call = 1;
  differs.other_byte = 0xff;
  differs.other_bytes = 8;
  expect_error(ErrorCode::mismatch, "rank 1 has other layers, arrays or expert slots than rank 0, or only one of them a window",
               [&] { construct(differs, {{part.data(), of_peer.data()}, 768}); });
}

/// A communicator whose work on a stream waits until begin_abort(), or 20 s.
struct WaitsForAbort : comm::Self<Cuda> {
  void begin_abort() { aborted = true; }
  void hold(cudaStream_t stream) {
    auto const wait = [](void* flag) {
      auto const end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
      while (!*static_cast<std::atomic<bool> const*>(flag) && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    };
    check_cuda(cudaLaunchHostFunc(stream, wait, &aborted), "cudaLaunchHostFunc");
  }
  std::atomic<bool> aborted = false;
};
static_assert(Communicator<WaitsForAbort>);

// Past the deadline nothing is left on the device that waits for a peer: memory can be freed.
TEST(EplbErrorsOnTheDevice, DeadlineEndsTheCommunicator) {
  ExpertMaps const maps = ExpertMaps::initial(1, 3, 0), next(eplb::Table<std::int32_t>({{2, 0, 1}}), 3);
  SlotWeights weights(1, 3);
  weights.load(maps, 0);
  CudaStream stream;
  {
    WaitsForAbort comm;
    eplb::WeightMover<WaitsForAbort> mover(comm, weights.tensors(), 3, {.timeout_ms = 100});
    comm.hold(stream);
    mover.fetch(0, maps.physical_to_logical().row(0), next.physical_to_logical().row(0), stream);
    EXPECT_FALSE(comm.aborted);
    expect_error(ErrorCode::timeout, "weights of layer 0: not done within 100 ms", [&] { mover.wait(); });
    EXPECT_TRUE(comm.aborted);
    stream.synchronize();
  }
  WaitsForAbort comm;
  eplb::CommGroup<WaitsForAbort> group(comm, stream, 100);
  EXPECT_EQ(group.all_gather(7), std::vector<std::uint64_t>{7});
  comm.hold(stream);
  expect_error(ErrorCode::timeout, "agreement of the EPLB group: not done within 100 ms", [&] { group.all_gather(7); });
  EXPECT_TRUE(comm.aborted);
  stream.synchronize();
}

// A rank whose process has ended, where the communicator knows it.
struct WaitsForTheDead : WaitsForAbort {
  int ended_rank() const { return 3; }
};
TEST(EplbErrorsOnTheDevice, DeadlineNamesARankThatHasEnded) {
  CudaStream stream;
  WaitsForTheDead comm;
  eplb::CommGroup<WaitsForTheDead> group(comm, stream, 100);
  comm.hold(stream);
  try {
    group.all_gather(7);
    ADD_FAILURE() << "no error";
  } catch (TransportError const& e) {
    EXPECT_EQ(e.code(), ErrorCode::timeout);
    EXPECT_EQ(e.peer(), 3);
    EXPECT_NE(std::string(e.what()).find("not done within 100 ms; the process of rank 3 has ended"), std::string::npos) << e.what();
  }
  EXPECT_TRUE(comm.aborted);
  stream.synchronize();
}

// After an error elsewhere: end() does not wait for the worker's deadline, and the weights are those of the maps.
TEST(EplbErrorsOnTheDevice, EndWhileAWeightIsUnderWay) {
  WaitsForAbort comm;
  eplb::SelfGroup group;
  CudaStream worker;
  ExpertMaps const maps = ExpertMaps::initial(kLayers, kExperts, kSlots - kExperts);
  SlotWeights weights(kLayers, kSlots);
  weights.load(maps, 0);
  eplb::RuntimeBalancer<WaitsForAbort, eplb::SelfGroup> balancer(
      comm, group, weights.tensors(),
      {.maps = maps, .options = {.window = 2, .step_interval = 2}, .mode = MoveMode::background, .worker_stream = worker});
  CountsChanges layers[kLayers];
  for (int l = 0; l < kLayers; ++l) balancer.attach(l, layers[l]);
  comm.hold(worker);
  for (int step = 0; step < 100 && !balancer.pending(); ++step) {
    for (int l = 0; l < kLayers; ++l) set_load(balancer, l, {1, 1, 1, 1, 100, 1, 1});
    balancer.step();
  }
  ASSERT_TRUE(balancer.pending());
  auto const start = std::chrono::steady_clock::now();
  balancer.end();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_TRUE(comm.aborted);
  EXPECT_FALSE(balancer.pending());
  EXPECT_EQ(balancer.maps(), maps);
  EXPECT_TRUE(weights.follow(maps, 0));
}

// The wait for a weight fails: error with layer, expert and peer; nothing is committed, and the layers are told nothing.
TEST(EplbErrorsOnTheDevice, TransferDeadline) {
  for (MoveMode mode : {MoveMode::pause, MoveMode::stepwise, MoveMode::background}) {
    TwoRanks comm;
    TwoRankGroup group;
    CudaStream worker;
    SlotWeights weights(1, 3);
    ExpertMaps const maps = ExpertMaps::initial(1, 4, 2);
    weights.load(maps, 0);
    TwoRankBalancer balancer(comm, group, weights.tensors(),
                             {.maps = maps, .options = {.step_interval = 1}, .mode = mode, .worker_stream = worker});
    CountsChanges layer;
    balancer.attach(0, layer);
    expect_error(ErrorCode::timeout, "weights of layer 0, expert 3 from rank 1", [&] {
      for (int step = 0; step < 10'000; ++step) {      // the counts of a step are read with the next one
        set_load(balancer, 0, {1, 1, 1, 1000, 1, 1});  // expert 3, on rank 1: rank 0 gets a replica
        balancer.step();
      }
    });
    EXPECT_TRUE(balancer.disabled());
    EXPECT_EQ(balancer.maps(), maps);
    EXPECT_TRUE(weights.follow(maps, 0));
    EXPECT_EQ(layer.changed, 0);
    EXPECT_FALSE(balancer.step().triggered);
  }
}

}  // namespace
