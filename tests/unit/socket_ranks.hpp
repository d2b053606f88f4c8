// SPDX-License-Identifier: Apache-2.0
// tests/unit/socket_ranks.hpp: ranks as forked processes that can be killed, without MPI, which would end them all.
#pragma once

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
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "moe/core/contract/concepts.hpp"
#include "moe/core/error.hpp"
#include "moe/core/space.hpp"

namespace moe_test {

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

/// Ranks as processes. A peer that ended gives E_PEER, one that does not answer in time E_TIMEOUT; both name the peer. Once a member has
/// ended, the others have half a second to arrive: one that noticed the death first may have left, and must not be named for it.
class SocketComm {
 public:
  using Space = moe::space::host;
  static constexpr char const* kName = "sockets";
  /// All processes, or those of `members`, in whose order they are numbered.
  SocketComm(Sockets& sockets, int rank, int timeout_ms)
      : sockets_(sockets), members_(static_cast<std::size_t>(sockets.ranks())), rank_(rank), timeout_ms_(timeout_ms) {
    std::iota(members_.begin(), members_.end(), 0);
  }
  SocketComm(Sockets& sockets, std::vector<int> members, int process, int timeout_ms)
      : sockets_(sockets),
        members_(std::move(members)),
        rank_(static_cast<int>(std::find(members_.begin(), members_.end(), process) - members_.begin())),
        timeout_ms_(timeout_ms) {}
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(members_.size()); }

  void all_to_all_v(void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out,
                    std::int64_t const* out_counts, std::int64_t const* out_offsets, moe::HostStream) {
    ++round_;
    std::vector<std::int64_t> sent(static_cast<std::size_t>(size()), 0), received = sent;
    auto const at = [](int r) { return static_cast<std::size_t>(r); };
    if (in_counts[rank_] > 0) {
      std::memcpy(static_cast<char*>(out) + out_offsets[rank_], static_cast<char const*>(in) + in_offsets[rank_],
                  static_cast<std::size_t>(in_counts[rank_]));
    }
    using Clock = std::chrono::steady_clock;
    auto end = Clock::now() + std::chrono::milliseconds(timeout_ms_);
    int ended = -1;
    for (;;) {
      int waits_for = -1;
      std::vector<pollfd> polls(static_cast<std::size_t>(size()), pollfd{-1, 0, 0});  // poll() skips -1
      for (int r = 0; r < size(); ++r) {
        if (r == rank_) continue;
        int const fd = sockets_.end(members_[at(rank_)], members_[at(r)]);
        while (sent[at(r)] < in_counts[r]) {
          auto const n = ::send(fd, static_cast<char const*>(in) + in_offsets[r] + sent[at(r)],
                                static_cast<std::size_t>(in_counts[r] - sent[at(r)]), MSG_NOSIGNAL);
          if (n < 0 && errno == EAGAIN) break;
          if (n < 0) throw error(moe::ErrorCode::peer, r, "the peer has ended");
          sent[at(r)] += n;
        }
        while (received[at(r)] < out_counts[r]) {
          auto const n = ::recv(fd, static_cast<char*>(out) + out_offsets[r] + received[at(r)],
                                static_cast<std::size_t>(out_counts[r] - received[at(r)]), 0);
          if (n < 0 && errno == EAGAIN) break;
          if (n <= 0) throw error(moe::ErrorCode::peer, r, "the peer has ended");
          received[at(r)] += n;
        }
        bool const writes = sent[at(r)] < in_counts[r], reads = received[at(r)] < out_counts[r];
        polls[at(r)] = {fd, static_cast<short>((writes ? POLLOUT : 0) | (reads ? POLLIN : 0)), 0};
        if ((writes || reads) && waits_for < 0) waits_for = r;
      }
      if (waits_for < 0) return;
      if (Clock::now() > end) {
        if (ended < 0) throw error(moe::ErrorCode::timeout, waits_for, "the peer did not arrive in time");
        throw error(moe::ErrorCode::peer, ended, "the peer has ended");
      }
      ::poll(polls.data(), polls.size(), 20);
      for (int r = 0; r < size() && ended < 0; ++r) {
        if ((polls[at(r)].revents & (POLLHUP | POLLERR)) == 0) continue;
        ended = r;
        end = std::min(end, Clock::now() + std::chrono::milliseconds(500));
      }
      if (ended >= 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // poll() does not wait from now on
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
  moe::TransportError error(moe::ErrorCode code, int peer, char const* what) const { return {code, rank_, peer, "sockets", round_, what}; }

  Sockets& sockets_;
  std::vector<int> members_;
  int rank_;
  int timeout_ms_;
  std::uint64_t round_ = 0;
};
static_assert(moe::Communicator<SocketComm>);

/// Runs body(process, channels) in processes that share `num_channels` sets of sockets, of which `deaths` die; returns each result, or 128
/// + signal. Survivors wait for each other at the end: one that left early would look dead as well.
inline std::vector<int> run_processes(int count, int deaths, int num_channels,
                                      std::function<int(int, std::vector<std::unique_ptr<Sockets>>&)> const& body) {
  std::vector<pid_t> children;
  void* const shared = mmap(nullptr, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  std::atomic_ref<int> done(*new (shared) int(0));
  {
    std::vector<std::unique_ptr<Sockets>> channels;
    for (int c = 0; c < num_channels; ++c) channels.push_back(std::make_unique<Sockets>(count));
    for (int process = 0; process < count; ++process) {
      pid_t const child = fork();
      if (child == 0) {
        alarm(60);  // a hang fails the test
        for (auto& sockets : channels) sockets->keep(process);
        int result = 99;
        try {
          result = body(process, channels);
        } catch (std::exception const& error) {
          std::fprintf(stderr, "process %d: %s\n", process, error.what());
        }
        ++done;
        while (done < count - deaths) usleep(1000);
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

}  // namespace moe_test
