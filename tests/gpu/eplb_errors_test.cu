// SPDX-License-Identifier: Apache-2.0
// tests/gpu/eplb_errors_test.cu: the errors of docs/semantics/eplb.md §11 in the CUDA space, row by row: counters, maps and weights in
// device memory. The rows on windows, maps and files have no test here (tests/mpi/eplb_weight_mover_test.cpp, tests/unit/).
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <string>
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

/// The weights of every slot of every layer: kBytes times the number of layer and expert.
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
  /// Whether every slot holds its expert.
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

/// One rank whose experts move between its slots.
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

/// Rank 0 of two, whose peer answers alike but for what `differs` adds to its words; it never sends weights.
struct TwoRanks : comm::Self<Cuda> {
  int size() const { return 2; }
  void all_gather(void const* in, std::int64_t n, void* out, cudaStream_t stream) {
    for (int r = 0; r < 2; ++r) Memory<Cuda>::copy_async(static_cast<char*>(out) + r * n, in, static_cast<std::size_t>(n), stream);
  }
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
TEST(EplbErrorsOnTheDevice, LoadThatIsNoNumber) {
  OneRankModel m(MoveMode::pause);
  m.attach();
  std::vector<std::int32_t> counts(kSlots, 1);
  counts[4] = -3;
  set_load(m.balancer, 1, counts);
  expect_error(ErrorCode::argument, "load of slot 4 in layer 1 must be at least 0, is -3", [&] {
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
  expect_error(ErrorCode::argument, "layer 0, w2: null, 2 slots of 8 bytes", [&] { make({"w2", nullptr, 2, 8, 8}); });
  expect_error(ErrorCode::argument, "layer 0, w2: 1 slots of 8 bytes, 8 apart; 2 slots are needed",
               [&] { make({"w2", reinterpret_cast<std::byte*>(data.data()), 1, 8, 8}); });
}

// The wait for a weight fails: error with layer, expert and peer; nothing is committed, and the layers are told nothing.
TEST(EplbErrorsOnTheDevice, TransferDeadline) {
  for (MoveMode mode : {MoveMode::pause, MoveMode::stepwise}) {
    TwoRanks comm;
    TwoRankGroup group;
    SlotWeights weights(1, 3);
    ExpertMaps const maps = ExpertMaps::initial(1, 4, 2);
    weights.load(maps, 0);
    TwoRankBalancer balancer(comm, group, weights.tensors(), {.maps = maps, .options = {.step_interval = 1}, .mode = mode});
    CountsChanges layer;
    balancer.attach(0, layer);
    expect_error(ErrorCode::timeout, "weights of layer 0, expert 3 from rank 1", [&] {
      for (int step = 0; step < 3; ++step) {           // the counts of a step are read with the next one
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
