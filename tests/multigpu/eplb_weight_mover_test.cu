// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/eplb_weight_mover_test.cu: expert weights between GPUs over NCCL and by stores into a
// window, synchronously and with a worker thread; between hosts by messages alone.
// moe-ranks: 2 4 8
#include <gtest/gtest.h>
#include <mpi.h>

#include <chrono>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "../expect_error.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/eplb/async_rearrangement.hpp"
#include "moe/eplb/rearrange.hpp"
#include "several_hosts.hpp"
#include "tests/random_maps.hpp"

namespace {

using namespace moe;
using eplb::ExpertMaps;
using eplb::Table;

constexpr int kLayers = 3, kSlots = 4;

comm::Nccl communicator(comm::Mpi& mpi) {
  return comm::Nccl::over(mpi.rank(), mpi.size(),
                          [&](void* data, std::size_t bytes) { mpi.broadcast(data, static_cast<std::int64_t>(bytes), 0, {}); });
}

/// Per layer two arrays whose words encode layer, expert, array and position: 1 MiB per expert, and a few bytes.
class Weights {
 public:
  Weights() {
    for (int i = 0; i < 2 * kLayers; ++i) arrays_.emplace_back(kSlots * words(i));
  }
  static std::int64_t words(int array) { return array % 2 == 0 ? (1 << 18) + 64 * array : 5; }
  static std::uint32_t word(int array, int expert, std::int64_t i) {
    return (static_cast<std::uint32_t>(array * 1009 + expert) * 2654435761U) ^ static_cast<std::uint32_t>(i);
  }
  void load(ExpertMaps const& maps, int rank) {
    for (int a = 0; a < 2 * kLayers; ++a) {
      std::vector<std::uint32_t> host;
      for (int s = 0; s < kSlots; ++s) {
        int const e = maps.physical_to_logical()(a / 2, rank * kSlots + s);
        for (std::int64_t i = 0; i < words(a); ++i) host.push_back(word(a, e, i));
      }
      arrays_[static_cast<std::size_t>(a)].copy_from_host(host.data());
    }
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  std::string check(ExpertMaps const& maps, int rank) const {
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (int a = 0; a < 2 * kLayers; ++a) {
      std::vector<std::uint32_t> host(static_cast<std::size_t>(kSlots * words(a)));
      arrays_[static_cast<std::size_t>(a)].copy_to_host(host.data());
      for (int s = 0; s < kSlots; ++s) {
        int const e = maps.physical_to_logical()(a / 2, rank * kSlots + s);
        for (std::int64_t i = 0; i < words(a); ++i) {
          if (host[static_cast<std::size_t>(s * words(a) + i)] != word(a, e, i)) {
            return text("rank ", rank, ", layer ", a / 2, ", array ", a % 2, ", expert slot ", s, ", expert ", e, ", word ", i);
          }
        }
      }
    }
    return "";
  }
  std::vector<eplb::LayerTensors> tensors() {
    std::vector<eplb::LayerTensors> out(kLayers);
    for (int a = 0; a < 2 * kLayers; ++a) {
      out[static_cast<std::size_t>(a / 2)].push_back(
          eplb::expert_tensor(text("array", a % 2), make_rows(arrays_[static_cast<std::size_t>(a)].data(), kSlots, words(a))));
    }
    return out;
  }

 private:
  std::vector<Buffer<std::uint32_t, space::cuda>> arrays_;
};

/// The ways in which weights move.
enum class By { messages, window };
/// A window for the experts of Weights, if they move by one.
class Window {
 public:
  Window(comm::Nccl& nccl, Weights& weights, By by) {
    if (by == By::window) window_.emplace(nccl, eplb::WeightMover<comm::Nccl>::bytes_needed(weights.tensors(), kSlots));
  }
  eplb::WeightMover<comm::Nccl>::Params params() const { return {.peers = window_ ? eplb::peer_buffers(*window_) : eplb::PeerBuffers{}}; }

 private:
  std::optional<comm::NcclSymmetric> window_;
};

class WeightMoverNccl : public testing::TestWithParam<By> {};
INSTANTIATE_TEST_SUITE_P(By, WeightMoverNccl, testing::Values(By::messages, By::window),
                         [](auto const& info) { return info.param == By::window ? "window" : "messages"; });

void random_maps_move(comm::Mpi& mpi, By by) {
  auto nccl = communicator(mpi);
  eplb::CommGroup<comm::Mpi> group(mpi);
  int const physical = kSlots * mpi.size();
  Weights weights;
  ExpertMaps maps = moe_test::random_maps(kLayers, physical - mpi.size(), physical, 1);
  weights.load(maps, mpi.rank());
  CudaStream stream;
  Window const window(nccl, weights, by);
  eplb::WeightMover<comm::Nccl> mover(nccl, weights.tensors(), kSlots, window.params());
  mover.profile(stream);
  EXPECT_EQ(weights.check(maps, mpi.rank()), "");
  for (unsigned round = 2; round < 10; ++round) {
    ExpertMaps const next = moe_test::random_maps(kLayers, physical - mpi.size(), physical, round);
    eplb::rearrange(mover, maps, next, group, [&](int layer) { maps.set_layer(layer, next); }, stream);
    ASSERT_EQ(weights.check(next, mpi.rank()), "") << "round " << round;
  }
  EXPECT_GT(mover.stats().bytes_received, 0);
}
TEST_P(WeightMoverNccl, B7_RandomMaps) {
  comm::Mpi mpi(MPI_COMM_WORLD);
  random_maps_move(mpi, GetParam());
}

// Ranks on several hosts: a window for weights is refused on all of them, in one sentence. As after every failed construction the group is
// over; in a new one weights move by messages.
TEST(WeightMoverHosts, AWindowIsRefusedAndMessagesMoveWeights) {
  if (!moe_test::on_several_hosts()) GTEST_SKIP() << "the ranks are on one host; MOE_TEST_HOSTS is not set";
  comm::Mpi mpi(MPI_COMM_WORLD);
  {
    auto nccl = communicator(mpi);
    Weights weights;
    moe_test::expect_error(ErrorCode::unsupported, "AllToAllV and AllGatherReduceScatter need",
                           [&] { Window const refused(nccl, weights, By::window); });
    mpi.barrier({});  // all ranks have been refused before the first one ends the group
  }
  random_maps_move(mpi, By::messages);
}

// The group also agrees over NCCL, without MPI.
TEST(GroupOverNccl, AgreesWithoutMpi) {
  comm::Mpi mpi(MPI_COMM_WORLD);
  auto nccl = communicator(mpi);
  CudaStream stream;
  eplb::CommGroup<comm::Nccl> group(nccl, stream);
  auto const words = group.all_gather(static_cast<std::uint64_t>(mpi.rank()) + 7);
  for (std::size_t r = 0; r < words.size(); ++r) EXPECT_EQ(words[r], r + 7);
  std::vector<std::int64_t> values(11);
  std::iota(values.begin(), values.end(), std::int64_t{1} << 54);
  group.all_reduce_sum(values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(values[i], mpi.size() * ((std::int64_t{1} << 54) + static_cast<std::int64_t>(i)));
  }
}

TEST_P(WeightMoverNccl, B13_BesideAWorkerThread) {
  comm::Mpi mpi(MPI_COMM_WORLD);
  auto nccl = communicator(mpi);
  eplb::CommGroup<comm::Mpi> group(mpi);
  int const physical = kSlots * mpi.size();
  Weights weights;
  ExpertMaps maps = moe_test::random_maps(kLayers, physical - 1, physical, 21);
  ExpertMaps const next = moe_test::random_maps(kLayers, physical - 1, physical, 22);
  weights.load(maps, mpi.rank());
  CudaStream worker, engine;
  Window const window(nccl, weights, GetParam());
  eplb::WeightMover<comm::Nccl> mover(nccl, weights.tensors(), kSlots, window.params());
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  eplb::AsyncRearrangement<comm::Nccl> async(mover, {.on_thread_start = [device] { check_cuda(cudaSetDevice(device), "cudaSetDevice"); }},
                                             worker);
  async.begin(maps, [next] { return next; });
  int commits = 0;
  for (int step = 0; step < 10'000 && async.pending(); ++step) {
    auto const done = async.step(group, [&](int layer, ExpertMaps const& to) { maps.set_layer(layer, to); }, engine);
    if (done.committed_layer >= 0) {
      ++commits;
      ASSERT_EQ(weights.check(maps, mpi.rank()), "") << "step " << step;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(commits, kLayers);
  EXPECT_EQ(maps, next);
}

}  // namespace
