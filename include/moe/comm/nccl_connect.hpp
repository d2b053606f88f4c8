// SPDX-License-Identifier: Apache-2.0
// comm/nccl_connect.hpp: starting an NCCL communicator: what it holds, how ranks get one id, how peers connect, how the host waits for it.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>
#include <sched.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "moe/comm/abortable.hpp"
#include "moe/comm/nccl_status.hpp"
#include "moe/comm/process.hpp"
#include "moe/core/cuda_space.hpp"

namespace moe::comm::detail {

/// NCCL's communicators of one rank, at an address that stays: NCCL's threads write to `made` and `made_direct` until a communicator is
/// made or aborted.
struct NcclState {
  using Comms = Abortable<ncclComm_t, 2>;
  static constexpr std::size_t kComm = 0;    ///< non-blocking: collectives
  static constexpr std::size_t kDirect = 1;  ///< blocking, but already connected: sends and receives
  ncclComm_t made = nullptr, made_direct = nullptr;
  Comms comms{[](ncclComm_t comm) { ncclCommAbort(comm); }};
};

/// A deadline, and a wait that first polls without pause and later yields its core.
class Backoff {
 public:
  /// 0: never expires.
  explicit Backoff(std::int64_t timeout_ms) : timeout_(timeout_ms) {}
  bool expired() const { return timeout_.count() > 0 && Clock::now() - start_ > timeout_; }
  void pause() {
    if (++polls_ > kSpins) {
      usleep(20);
    } else if (polls_ > kSpins / 4) {
      sched_yield();
    }
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kSpins = 4000;
  std::chrono::milliseconds timeout_;
  Clock::time_point start_ = Clock::now();
  std::int64_t polls_ = 0;
};

/// Device memory for a call outside any round.
struct DeviceBytes {
  explicit DeviceBytes(std::size_t n) : data(Memory<space::cuda>::allocate(n)) {}
  DeviceBytes(DeviceBytes const&) = delete;
  DeviceBytes& operator=(DeviceBytes const&) = delete;
  ~DeviceBytes() { Memory<space::cuda>::release(data); }
  void* data;
};

/// Whether NCCL has lost a connection.
inline bool lost_connection(ncclResult_t result) { return result == ncclRemoteError || result == ncclSystemError; }

/// What a rank learns of the others when they meet.
struct Peers {
  bool one_node = false;
  std::vector<ProcessMark> processes{};  ///< [ranks]; none before

  /// gather(in, n, out) gathers n bytes of host memory of each rank.
  template <class Gather>
  static Peers meet(int ranks, Gather const& gather) {
    struct Card {
      std::array<char, 64> host{};
      ProcessMark process{};
    } own;
    own.process = ProcessMark::mine();
    gethostname(own.host.data(), own.host.size() - 1);
    std::vector<Card> cards(static_cast<std::size_t>(ranks));
    gather(&own, static_cast<std::int64_t>(sizeof own), cards.data());
    Peers out{.one_node = true};
    for (Card const& c : cards) {
      out.one_node = out.one_node && c.host == own.host;
      out.processes.push_back(c.process);
    }
    return out;
  }
  /// The first rank whose process has ended, or -1. A process that dies closes its sockets before it has ended: with `awaited` this looks
  /// for half a second.
  int ended(int here, bool awaited) const {
    int found = first_ended(processes, here);
    for (int looks = 0; awaited && found < 0 && !processes.empty() && looks < 100; ++looks) {
      usleep(5000);
      found = first_ended(processes, here);
    }
    return found;
  }
};

/// A new id; one rank makes it and hands it to the others.
inline ncclUniqueId unique_id() {
  ncclUniqueId id;
  check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
  return id;
}
/// Rank 0 writes a new id to the file, the others wait for it. E_CONFIG on rank 0 if the file exists, E_TIMEOUT if it does not appear.
inline ncclUniqueId id_over_file(std::string const& path, int rank, std::int64_t timeout_ms) {
  ncclUniqueId id{};
  if (rank == 0) {
    write_id(path, id = unique_id());
    return id;
  }
  for (Backoff const backoff(timeout_ms); !read_id(path, id); usleep(5000)) {
    if (backoff.expired()) {
      throw TransportError(ErrorCode::timeout, rank, 0, "construction", 0,
                           text("nccl: no id in the file ", path, " within ", timeout_ms, " ms"));
    }
  }
  return id;
}
/// The id of rank 0, sent with `broadcast(void* data, std::size_t bytes)` over host memory. E_PEER if rank 0 has no NCCL to make one with.
template <class Broadcast>
ncclUniqueId id_over(int rank, Broadcast&& broadcast) {
  struct Offer {
    ncclUniqueId id;
    bool valid;
  } offer{};
  std::string why;
  if (rank == 0) {
    try {
      check_nccl_version();
      offer = {unique_id(), true};
    } catch (Error const& e) {
      why = e.what();
    }
  }
  broadcast(static_cast<void*>(&offer), sizeof(offer));
  if (!offer.valid) {
    throw TransportError(ErrorCode::peer, rank, 0, "construction", 0, text("nccl: rank 0 made no id", why.empty() ? "" : ": ", why));
  }
  return offer.id;
}

/// Exchanges a few bytes with every rank on a separate thread. If a peer does not arrive, the thread is abandoned.
struct Meeting {
  ncclComm_t comm;
  int rank;
  int size;
  DeviceBytes words;
  int device = 0;
  CudaStream stream{};
  std::atomic<int> result{-1};  ///< ncclResult_t once NCCL has connected; the work that it posted completes with the stream

  Meeting(ncclComm_t c, int r, int n) : comm(c), rank(r), size(n), words(std::size_t{2} * 16 * static_cast<std::size_t>(n)) {}
};
inline std::shared_ptr<Meeting> meet_peers(ncclComm_t comm, int rank, int size) {
  auto const meeting = std::make_shared<Meeting>(comm, rank, size);
  check_cuda(cudaGetDevice(&meeting->device), "cudaGetDevice");
  std::thread([meeting] {
    Meeting& m = *meeting;
    cudaSetDevice(m.device);
    auto* const at = static_cast<std::byte*>(m.words.data);
    ncclGroupStart();
    for (int i = 1; i < m.size; ++i) {
      int const to = (m.rank + i) % m.size;
      int const from = (m.rank + m.size - i) % m.size;
      ncclSend(at + 16 * to, 16, ncclInt8, to, m.comm, m.stream);
      ncclRecv(at + 16 * (m.size + from), 16, ncclInt8, from, m.comm, m.stream);
    }
    m.result = static_cast<int>(ncclGroupEnd());
  }).detach();
  return meeting;
}

}  // namespace moe::comm::detail
