// SPDX-License-Identifier: Apache-2.0
// tests/unit/eplb_killed_test.cpp: a rearrangement between forked processes of which one is killed. Without MPI, which would end them all.
#include "moe/eplb/rearrange.hpp"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "moe/core/concepts.hpp"
#include "moe/eplb/async_rearrangement.hpp"
#include "tests/mpi/eplb_harness.hpp"

namespace {

using namespace moe_test;
using moe::ErrorCode;
using Clock = std::chrono::steady_clock;

/// One stream socket for each pair of ranks, made before the processes part.
class Sockets {
 public:
  explicit Sockets(int ranks) : ranks_(ranks), end_(static_cast<std::size_t>(ranks * ranks), -1) {
    for (int a = 0; a < ranks; ++a) {
      for (int b = 0; b < a; ++b) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair) != 0) throw std::runtime_error("socketpair");
        end(a, b) = pair[0];
        end(b, a) = pair[1];
      }
    }
  }
  ~Sockets() {
    for (int fd : end_) ::close(fd);
  }
  int ranks() const { return ranks_; }
  int& end(int mine, int peer) {
    return end_[static_cast<std::size_t>(mine) * static_cast<std::size_t>(ranks_) + static_cast<std::size_t>(peer)];
  }
  /// In rank r's process: only r's ends stay open, so that its death closes them.
  void keep(int r) {
    for (int a = 0; a < ranks_; ++a) {
      for (int b = 0; a != r && b < ranks_; ++b) {
        if (end(a, b) >= 0) ::close(std::exchange(end(a, b), -1));
      }
    }
  }

 private:
  int ranks_;
  std::vector<int> end_;
};

/// Ranks as processes. A peer that ended gives E_PEER, one that does not answer in time E_TIMEOUT; both name the peer.
class SocketComm {
 public:
  using Space = moe::space::host;
  static constexpr char const* kName = "sockets";
  SocketComm(Sockets& sockets, int rank, int timeout_ms) : sockets_(sockets), rank_(rank), timeout_ms_(timeout_ms) {}
  int rank() const { return rank_; }
  int size() const { return sockets_.ranks(); }

  void all_to_all_v(void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out,
                    std::int64_t const* out_counts, std::int64_t const* out_offsets, moe::HostStream) {
    ++round_;
    std::vector<std::int64_t> sent(static_cast<std::size_t>(size()), 0), received = sent;
    auto const at = [](int r) { return static_cast<std::size_t>(r); };
    if (in_counts[rank_] > 0) {
      std::memcpy(static_cast<char*>(out) + out_offsets[rank_], static_cast<char const*>(in) + in_offsets[rank_],
                  static_cast<std::size_t>(in_counts[rank_]));
    }
    auto const end = Clock::now() + std::chrono::milliseconds(timeout_ms_);
    for (;;) {
      int waits_for = -1;
      std::vector<pollfd> polls;
      for (int r = 0; r < size(); ++r) {
        if (r == rank_) continue;
        int const fd = sockets_.end(rank_, r);
        while (sent[at(r)] < in_counts[r]) {
          auto const n = ::send(fd, static_cast<char const*>(in) + in_offsets[r] + sent[at(r)],
                                static_cast<std::size_t>(in_counts[r] - sent[at(r)]), MSG_NOSIGNAL);
          if (n < 0 && errno == EAGAIN) break;
          if (n < 0) throw moe::TransportError(ErrorCode::peer, rank_, r, "sockets", round_, "the peer has ended");
          sent[at(r)] += n;
        }
        while (received[at(r)] < out_counts[r]) {
          auto const n = ::recv(fd, static_cast<char*>(out) + out_offsets[r] + received[at(r)],
                                static_cast<std::size_t>(out_counts[r] - received[at(r)]), 0);
          if (n < 0 && errno == EAGAIN) break;
          if (n <= 0) throw moe::TransportError(ErrorCode::peer, rank_, r, "sockets", round_, "the peer has ended");
          received[at(r)] += n;
        }
        bool const writes = sent[at(r)] < in_counts[r], reads = received[at(r)] < out_counts[r];
        if (writes || reads) polls.push_back({fd, static_cast<short>((writes ? POLLOUT : 0) | (reads ? POLLIN : 0)), 0});
        if ((writes || reads) && waits_for < 0) waits_for = r;
      }
      if (polls.empty()) return;
      if (Clock::now() > end) {
        throw moe::TransportError(ErrorCode::timeout, rank_, waits_for, "sockets", round_, "the peer did not arrive in time");
      }
      ::poll(polls.data(), polls.size(), 20);
    }
  }
  void all_gather_v(void const* in, std::int64_t n, void* out, std::int64_t const* counts, std::int64_t const* offsets,
                    moe::HostStream stream) {
    std::vector<std::int64_t> const same(static_cast<std::size_t>(size()), n), zeros(same.size(), 0);
    all_to_all_v(in, same.data(), zeros.data(), out, counts, offsets, stream);
  }
  void all_gather(void const* in, std::int64_t n, void* out, moe::HostStream stream) {
    std::vector<std::int64_t> counts(static_cast<std::size_t>(size()), n), offsets;
    for (int r = 0; r < size(); ++r) offsets.push_back(r * n);
    all_gather_v(in, n, out, counts.data(), offsets.data(), stream);
  }
  void barrier(moe::HostStream stream) {
    char token = 0;
    std::vector<char> tokens(static_cast<std::size_t>(size()));
    all_gather(&token, 1, tokens.data(), stream);
  }
  // Not used for moving weights.
  void broadcast(void*, std::int64_t, int, moe::HostStream) { std::abort(); }
  void all_reduce(float const*, std::int64_t, float*, moe::HostStream) { std::abort(); }
  void reduce_scatter_v(float const*, std::int64_t const*, std::int64_t const*, float*, moe::HostStream) { std::abort(); }

 private:
  Sockets& sockets_;
  int rank_;
  int timeout_ms_;
  std::uint64_t round_ = 0;
};
static_assert(moe::Communicator<SocketComm>);

/// Runs body(weights, engine) in a process for each rank, of which one dies; returns each result, or 128 + signal. Survivors wait for each
/// other at the end: one that left early would look dead as well.
std::vector<int> run_ranks(int ranks, std::function<int(SocketComm&, SocketComm&)> const& body) {
  std::vector<pid_t> children;
  void* const shared = mmap(nullptr, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  std::atomic_ref<int> done(*new (shared) int(0));
  {
    Sockets weights(ranks), engine(ranks);
    for (int r = 0; r < ranks; ++r) {
      pid_t const child = fork();
      if (child == 0) {
        alarm(60);  // a hang fails the test
        weights.keep(r);
        engine.keep(r);
        SocketComm w(weights, r, 1500), e(engine, r, 4500);  // much more than a busy machine needs
        int result = 99;
        try {
          result = body(w, e);
        } catch (std::exception const& error) {
          std::fprintf(stderr, "rank %d: %s\n", r, error.what());
        }
        ++done;
        while (done < ranks - 1) usleep(1000);
        _exit(result);
      }
      children.push_back(child);
    }
  }
  std::vector<int> results;
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    results.push_back(WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status));
  }
  munmap(shared, sizeof(int));
  return results;
}

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
    EXPECT_EQ(run_ranks(ranks, body), expected) << ranks << " ranks";
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
