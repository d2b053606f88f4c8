// SPDX-License-Identifier: Apache-2.0
// comm/nccl_symmetric.hpp: a window of device memory that every rank of a node maps, through NCCL's window registration.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_device_api.hpp"
#include "moe/comm/symmetric_memory.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"

namespace moe::comm {

namespace detail {
/// Addresses of every rank's part of the window as mapped here, into `out` (device, [ranks]). Defined in nccl_symmetric.cuh.
void resolve_peers(ncclWindow_t window, int ranks, char** out, cudaStream_t stream);
}  // namespace detail

/// One rank's part of a window: `bytes` of zeroed device memory, peer pointers resolved once, a failure record in host memory.
/// Construction is collective. Destruction is local: it synchronises the device but waits for no peer.
class NcclSymmetric {
 public:
  using Space = space::cuda;
  using Comm = Nccl;
  static constexpr char const* kName = "nccl_symmetric";
  struct Params {
    std::optional<std::int64_t> timeout_ms{};  ///< deadline of every wait of a kernel on a peer; unset: the communicator's; 0: none
  };

  /// `user_bytes` follow the control part. E_UNSUPPORTED if some rank is not reachable by loads and stores, E_CAPACITY if the memory cannot
  /// be allocated, E_CUDA otherwise. `comm` is borrowed and must outlive the window.
  NcclSymmetric(Nccl& comm, std::int64_t user_bytes, Params const& params) : comm_(&comm) {
    if (comm.size() > kMaxWindowRanks) {
      throw Error(ErrorCode::unsupported, text("window: ", comm.size(), " ranks, at most ", kMaxWindowRanks));
    }
    bytes_ = (static_cast<std::size_t>(user_bytes) + kWindowControlBytes + kGranularity - 1) / kGranularity * kGranularity;
    try {
      construct(static_cast<std::uint64_t>(params.timeout_ms.value_or(comm.timeout_ms())) * 1'000'000);
    } catch (...) {
      release();
      throw;
    }
  }
  NcclSymmetric(Nccl& comm, std::int64_t user_bytes) : NcclSymmetric(comm, user_bytes, Params{}) {}
  NcclSymmetric(NcclSymmetric const&) = delete;
  NcclSymmetric& operator=(NcclSymmetric const&) = delete;
  ~NcclSymmetric() { release(); }

  int rank() const { return comm_->rank(); }
  int size() const { return comm_->size(); }
  std::int64_t bytes() const { return static_cast<std::int64_t>(bytes_); }
  /// The same offset in the peer's part, as mapped here. Offsets below kWindowControlBytes belong to the window.
  void* peer(int r, std::int64_t offset) const { return view_.peer[r] + offset; }
  /// The view that kernels take as a parameter.
  WindowView const& view() const { return view_; }
  /// Nccl::ended_rank().
  int ended_rank() const { return comm_->ended_rank(); }
  /// Throws the error that a kernel has reported since the last call; call after synchronising.
  void check() const { throw_if_failed(*failure_); }

 private:
  static constexpr std::size_t kGranularity = std::size_t{2} << 20;

  void construct(std::uint64_t timeout_ns) {
    comm_->meet();
    // Ranks agree before the first collective call on the window, so that a rank without memory does not leave the others waiting.
    if (ncclMemAlloc(&base_, bytes_) != ncclSuccess) {
      base_ = nullptr;
      cudaGetLastError();
    }
    if (int const failed = ranks_where(base_ == nullptr); failed > 0) {
      throw Error(ErrorCode::capacity, text("window: ", failed, " of ", size(), " ranks cannot allocate ", bytes_, " bytes; rank ", rank(),
                                            base_ == nullptr ? " is one of them" : " could"));
    }
    check_cuda(cudaMemset(base_, 0, bytes_), "cudaMemset");
    void* host = nullptr;
    check_cuda(cudaHostAlloc(&host, sizeof(FailureRecord), cudaHostAllocMapped), "cudaHostAlloc");
    failure_ = static_cast<FailureRecord*>(host);
    std::memset(failure_, 0, sizeof(FailureRecord));
    void* mapped = nullptr;
    check_cuda(cudaHostGetDevicePointer(&mapped, host, 0), "cudaHostGetDevicePointer");
    view_.failure = static_cast<FailureRecord*>(mapped);
    view_.rank = rank();
    view_.size = size();
    view_.timeout_ns = timeout_ns;
    if (size() == 1) {
      view_.peer[0] = static_cast<char*>(base_);  // NCCL makes no symmetric window for a communicator of one rank
    } else {
      register_window();
    }
    // Every part is zero before any peer writes to it.
    comm_->barrier(nullptr);
    comm_->synchronize(nullptr);
  }
  /// Makes every rank's part readable and writable here, and looks up where it is mapped. Collective.
  void register_window() {
    auto* const c = comm_->handle();
    comm_->check(ncclCommWindowRegister(c, base_, bytes_, &window_, NCCL_WIN_COLL_SYMMETRIC), "ncclCommWindowRegister");
    if (window_ == nullptr) refuse_ranks();
    // Asked first: a refused ncclDevCommCreate() may end the communicator (NCCL 2.28.9).
    if (ncclTeam_t const reached = ncclTeamLsa(c); reached.nRanks > 0) expect_all_reached(reached.nRanks, reached.rank);
    ncclDevCommRequirements requirements;
    std::memset(&requirements, 0, sizeof(requirements));
    requirements.lsaBarrierCount = 1;
    ncclResult_t const created = ncclDevCommCreate(c, &requirements, &device_comm_);
    if (created == ncclInvalidUsage) refuse_ranks();  // what NCCL 2.28 answers on every rank if some are on other hosts
    comm_->check(created, "ncclDevCommCreate");
    has_device_comm_ = true;
    expect_all_reached(device_comm_.lsaSize, device_comm_.lsaRank);
    char** table = nullptr;
    check_cuda(cudaMalloc(&table, sizeof(char*) * kMaxWindowRanks), "cudaMalloc");
    detail::resolve_peers(window_, size(), table, nullptr);
    cudaError_t const copied = cudaMemcpy(view_.peer, table, sizeof(char*) * static_cast<std::size_t>(size()), cudaMemcpyDeviceToHost);
    cudaFree(table);
    check_cuda(copied, "cudaMemcpy");
  }
  /// reached: the number of ranks that this one can load from and store to; place: this rank's among them.
  void expect_all_reached(int reached, int place) const {
    if (reached == size()) return;
    int const first = rank() - place;
    int const other = first > 0 ? 0 : first + reached;
    throw Error(ErrorCode::unsupported, text("window: rank ", rank(), " cannot load from and store to rank ", other, " (it reaches ",
                                             reached, " of ", size(), " ranks); AllToAllV and AllGatherReduceScatter need no peer access"));
  }
  [[noreturn]] static void refuse_ranks() {
    throw Error(ErrorCode::unsupported,
                "window: NCCL makes no window for these ranks: they are on several hosts, or their GPUs have no peer access; "
                "AllToAllV and AllGatherReduceScatter need none");
  }
  /// The number of ranks on which `failed` is true. Collective.
  int ranks_where(bool failed) {
    Buffer<float, space::cuda> word(1);
    float const mine = failed ? 1.0F : 0.0F;
    word.copy_from_host(&mine);
    comm_->all_reduce(word.data(), 1, word.data(), nullptr);
    comm_->synchronize(nullptr);
    float all = 0.0F;
    word.copy_to_host(&all);
    return static_cast<int>(all);
  }
  void release() noexcept {
    cudaDeviceSynchronize();
    if (comm_->failed()) {
      comm_->abort();  // abort() also frees what the communicator registered
    } else {
      if (has_device_comm_) {
        ncclDevCommDestroy(comm_->handle(), &device_comm_);
      }
      if (window_ != nullptr) {
        ncclCommWindowDeregister(comm_->handle(), window_);
      }
    }
    if (base_ != nullptr) {
      ncclMemFree(base_);
    }
    if (failure_ != nullptr) {
      cudaFreeHost(failure_);
    }
  }

  Nccl* comm_;
  std::size_t bytes_ = 0;
  void* base_ = nullptr;
  ncclWindow_t window_ = nullptr;
  ncclDevComm device_comm_{};
  bool has_device_comm_ = false;
  FailureRecord* failure_ = nullptr;
  WindowView view_;
};

}  // namespace moe::comm
