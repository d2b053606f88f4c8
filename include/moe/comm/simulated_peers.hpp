// SPDX-License-Identifier: Apache-2.0
// comm/simulated_peers.hpp: several ranks on one GPU in one process: the views of a real window, without links. For tests.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "moe/comm/symmetric_memory.hpp"
#include "moe/core/cuda_space.hpp"

namespace moe::comm {

/// `ranks` parts of zeroed device memory on the current device; each rank sees all of them. The kernels of all ranks must be resident on
/// the device together, and nothing may serialise them: load the program's kernels before the first call (CUDA_MODULE_LOADING=EAGER).
class SimulatedPeers {
 public:
  SimulatedPeers(int ranks, std::int64_t user_bytes, std::uint64_t timeout_ns = kDefaultTimeoutNs)
      : bytes_(static_cast<std::size_t>(user_bytes) + kWindowControlBytes) {
    if (ranks < 1 || ranks > kMaxWindowRanks) {
      throw Error(ErrorCode::unsupported, text("window: ", ranks, " ranks, at most ", kMaxWindowRanks));
    }
    check_cuda(
        cudaHostAlloc(reinterpret_cast<void**>(&failures_), sizeof(FailureRecord) * static_cast<std::size_t>(ranks), cudaHostAllocMapped),
        "cudaHostAlloc");
    std::memset(failures_, 0, sizeof(FailureRecord) * static_cast<std::size_t>(ranks));
    views_.resize(static_cast<std::size_t>(ranks));
    std::vector<char*> parts;
    for (int r = 0; r < ranks; ++r) {
      parts.push_back(static_cast<char*>(Memory<space::cuda>::allocate(bytes_)));
      Memory<space::cuda>::fill(parts.back(), 0, bytes_);
    }
    for (int r = 0; r < ranks; ++r) {
      WindowView& v = views_[static_cast<std::size_t>(r)];
      for (int p = 0; p < ranks; ++p) {
        v.peer[p] = parts[static_cast<std::size_t>(p)];
      }
      v.rank = r;
      v.size = ranks;
      v.failure = failures_ + r;
      v.timeout_ns = timeout_ns;
    }
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  SimulatedPeers(SimulatedPeers const&) = delete;
  SimulatedPeers& operator=(SimulatedPeers const&) = delete;
  ~SimulatedPeers() {
    cudaDeviceSynchronize();
    for (std::size_t r = 0; r < views_.size(); ++r) {
      Memory<space::cuda>::release(views_[0].peer[r]);
    }
    cudaFreeHost(failures_);
  }

  int size() const { return static_cast<int>(views_.size()); }
  std::int64_t bytes() const { return static_cast<std::int64_t>(bytes_); }
  WindowView const& view(int rank) const { return views_[static_cast<std::size_t>(rank)]; }
  WindowView& view(int rank) { return views_[static_cast<std::size_t>(rank)]; }
  /// Throws the error that a kernel of that rank has reported since the last call; call after synchronising.
  void check(int rank) const { throw_if_failed(failures_[rank]); }
  FailureRecord const& failure(int rank) const { return failures_[rank]; }
  FailureRecord& failure(int rank) { return failures_[rank]; }

 private:
  std::size_t bytes_;
  FailureRecord* failures_ = nullptr;
  std::vector<WindowView> views_;
};

class SimulatedWindow;

/// The windows that simulated ranks share: rank r's n-th window is a view of the group's n-th.
class SimulatedGroup {
 public:
  explicit SimulatedGroup(int ranks) : ranks_(ranks) {}
  int size() const { return ranks_; }

 private:
  friend class SimulatedWindow;
  SimulatedPeers& window(std::size_t n, std::int64_t user_bytes, std::uint64_t timeout_ns) {
    if (n == windows_.size()) {
      windows_.push_back(std::make_unique<SimulatedPeers>(ranks_, user_bytes, timeout_ns));
    }
    std::int64_t const bytes = windows_[n]->bytes() - static_cast<std::int64_t>(kWindowControlBytes);
    if (bytes != user_bytes) {
      throw Error(ErrorCode::mismatch, text("window: rank 0 wants ", bytes, " bytes, another rank ", user_bytes));
    }
    return *windows_[n];
  }
  int ranks_;
  std::vector<std::unique_ptr<SimulatedPeers>> windows_;
};

/// One rank of a group, as the communicator that exchanges take. It has no collectives: constructing an exchange must need none.
class SimulatedRank {
 public:
  using Space = space::cuda;
  SimulatedRank(SimulatedGroup& group, int rank) : group_(&group), rank_(rank) {}
  int rank() const { return rank_; }
  int size() const { return group_->size(); }
  SimulatedGroup& group() const { return *group_; }

 private:
  friend class SimulatedWindow;
  SimulatedGroup* group_;
  int rank_;
  std::size_t next_ = 0;
};

/// One simulated rank's view of a window; stands in for NcclSymmetric. The group owns the memory.
class SimulatedWindow {
 public:
  using Space = space::cuda;
  using Comm = SimulatedRank;
  static constexpr char const* kName = "simulated_window";
  struct Params {
    std::uint64_t timeout_ns = kDefaultTimeoutNs;  ///< deadline of every wait of a kernel on a peer; 0: none
  };
  SimulatedWindow(SimulatedRank& comm, std::int64_t user_bytes, Params const& params)
      : peers_(&comm.group().window(comm.next_, user_bytes, params.timeout_ns)), rank_(comm.rank()) {
    ++comm.next_;
  }
  int rank() const { return rank_; }
  int size() const { return peers_->size(); }
  std::int64_t bytes() const { return peers_->bytes(); }
  void* peer(int r, std::int64_t offset) const { return view().peer[r] + offset; }
  WindowView const& view() const { return peers_->view(rank_); }
  void check() const { peers_->check(rank_); }

 private:
  SimulatedPeers* peers_;
  int rank_;
};

}  // namespace moe::comm
