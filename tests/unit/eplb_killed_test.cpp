// SPDX-License-Identifier: Apache-2.0
// tests/unit/eplb_killed_test.cpp: a rearrangement between forked processes of which one is killed. Without MPI, which would end them all.
#include "moe/eplb/rearrange.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <functional>
#include <thread>
#include <vector>

#include "moe/eplb/async_rearrangement.hpp"
#include "tests/mpi/eplb_harness.hpp"
#include "tests/unit/socket_ranks.hpp"

namespace {

using namespace moe_test;
using moe::ErrorCode;
using Clock = std::chrono::steady_clock;

constexpr int kLayers = 4, kSlots = 2;

/// Maps, weights and mover of one rank; its next experts are those of the rank after it.
struct Moving {
  explicit Moving(SocketComm& comm)
      : maps(ExpertMaps::initial(kLayers, kSlots * comm.size(), 0)), weights(kLayers, kSlots, 100'000), rank(comm.rank()) {
    Table<std::int32_t> map = maps.physical_to_logical();
    for (int l = 0; l < kLayers; ++l) std::rotate(map.row(l).begin(), map.row(l).begin() + kSlots, map.row(l).end());
    next = ExpertMaps(map, maps.num_logical());
    weights.load(maps, rank);
  }
  /// 0: got an error in time that names the rank; maps and weights match, and the layers before `layers` have moved.
  int verdict(moe::TransportError const& e, int killed, int layers, Clock::time_point began) const {
    if (e.code() != ErrorCode::peer && e.code() != ErrorCode::timeout) return 2;
    if (e.peer() != killed) {
      std::fprintf(stderr, "rank %d: %s\n", rank, e.what());
      return 3;
    }
    if (Clock::now() - began > std::chrono::seconds(9)) return 4;
    for (int l = 0; l < kLayers; ++l) {
      if (maps.layer_differs(l, next) != (l >= layers)) return 5;
    }
    return weights.check(maps, rank).empty() ? 0 : 6;
  }
  ExpertMaps maps, next;
  PatternWeights weights;
  int rank;
};

enum class Death { between_layers, while_sending };

// The second rank dies after the first layer: before it takes part in the second one, or with half of its experts sent.
int survive_synchronous(SocketComm& weights, SocketComm& engine, Death death) {
  Moving m(weights);
  moe::eplb::WeightMover<SocketComm> mover(weights, m.weights.tensors(), kSlots);
  moe::eplb::CommGroup<SocketComm> group(engine);
  auto const began = Clock::now();
  try {
    moe::eplb::rearrange(mover, m.maps, m.next, group, [&](int layer) {
      m.maps.set_layer(layer, m.next);
      if (m.rank != 1) return;
      if (death == Death::between_layers) raise(SIGKILL);
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::microseconds(100));
        raise(SIGKILL);
      }).detach();
    });
  } catch (moe::TransportError const& e) {
    int moved = 0;
    while (moved < kLayers && !m.maps.layer_differs(moved, m.next)) ++moved;
    if (death == Death::between_layers && moved != 1) return 7;
    return m.verdict(e, 1, moved, began);
  }
  // The loss of a rank that was killed after its last message is not noticed.
  return death == Death::while_sending && !m.maps.layer_differs(kLayers - 1, m.next) ? m.weights.check(m.maps, m.rank).empty() ? 0 : 8 : 1;
}

void expect_survivors(std::function<int(SocketComm&, SocketComm&)> const& body) {
  for (int ranks : {2, 3, 4}) {
    std::vector<int> expected(static_cast<std::size_t>(ranks), 0);
    expected[1] = 128 + SIGKILL;
    EXPECT_EQ(run_processes(ranks, 1, 2,
                            [&](int r, auto& channels) {
                              SocketComm w(*channels[0], r, 5000), e(*channels[1], r, 15000);  // much more than a busy machine needs
                              return body(w, e);
                            }),
              expected)
        << ranks << " ranks";
  }
}

TEST(EplbKilled, SynchronousBetweenLayers) {
  expect_survivors([](SocketComm& w, SocketComm& e) { return survive_synchronous(w, e, Death::between_layers); });
}
TEST(EplbKilled, SynchronousWhileSending) {
  for (int i = 0; i < 2; ++i) {
    expect_survivors([](SocketComm& w, SocketComm& e) {
      int const result = survive_synchronous(w, e, Death::while_sending);
      if (w.rank() == 1) raise(SIGKILL);
      return result;
    });
  }
}

// With a worker thread: the engine's next step names the dead rank.
TEST(EplbKilled, B14_BesideAWorkerThread) {
  expect_survivors([](SocketComm& weights, SocketComm& engine) {
    Moving m(weights);
    moe::eplb::WeightMover<SocketComm> mover(weights, m.weights.tensors(), kSlots);
    moe::eplb::CommGroup<SocketComm> group(engine);
    moe::eplb::AsyncRearrangement<SocketComm> async(mover);
    async.begin(m.maps, [next = m.next] { return next; });
    auto const began = Clock::now();
    int commits = 0;
    try {
      while (async.pending()) {
        auto const step = async.step(group, [&](int layer, ExpertMaps const& to) { m.maps.set_layer(layer, to); });
        if (step.committed_layer >= 0 && ++commits == 2 && m.rank == 1) raise(SIGKILL);
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    } catch (moe::TransportError const& e) {
      return async.disabled() ? m.verdict(e, 1, 2, began) : 9;
    }
    return 1;
  });
}

}  // namespace
