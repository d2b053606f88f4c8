// SPDX-License-Identifier: Apache-2.0
// comm/nccl.hpp: NCCL as a Communicator of the device: bootstrap by unique id (given, over a file, or over any broadcast) and collectives.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <utility>

#include "moe/comm/nccl_status.hpp"
#include "moe/core/cuda_space.hpp"

namespace moe::comm {

/// One rank of an NCCL communicator on the current device. Movable, not copyable. Collectives are enqueued on the stream; counts and
/// offsets are in bytes (reductions: elements) and in host memory.
class Nccl {
 public:
  using Space = space::cuda;
  using StreamType = Stream<Space>;
  static constexpr char const* kName = "nccl";

  /// Collective over `size` ranks that hold the same id. E_UNSUPPORTED if the loaded NCCL is not the one compiled against.
  Nccl(int rank, int size, ncclUniqueId const& id) : rank_(rank), size_(size) {
    detail::check_nccl_version();
    detail::check_nccl(ncclCommInitRank(&comm_, size, id, rank), "ncclCommInitRank");
  }
  /// Takes over a communicator.
  explicit Nccl(ncclComm_t comm) : comm_(comm) {
    detail::check_nccl_version();
    detail::check_nccl(ncclCommUserRank(comm, &rank_), "ncclCommUserRank", comm);
    detail::check_nccl(ncclCommCount(comm, &size_), "ncclCommCount", comm);
  }
  Nccl(Nccl&& other) noexcept
      : comm_(std::exchange(other.comm_, nullptr)),
        rank_(other.rank_),
        size_(other.size_),
        barrier_word_(std::exchange(other.barrier_word_, nullptr)) {}
  Nccl& operator=(Nccl&& other) noexcept {
    std::swap(comm_, other.comm_);
    std::swap(rank_, other.rank_);
    std::swap(size_, other.size_);
    std::swap(barrier_word_, other.barrier_word_);
    return *this;
  }
  ~Nccl() {
    if (comm_ != nullptr) {
      ncclCommAbort(comm_);  // never waits for a peer, dead or alive
    }
    cudaFree(barrier_word_);
  }

  /// A new id, for one rank to make and hand to the others.
  static ncclUniqueId unique_id() {
    ncclUniqueId id;
    detail::check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
    return id;
  }
  /// Collective bootstrap over a file that all ranks see: rank 0 writes the id, the others wait for it. E_TIMEOUT after `timeout`.
  /// `path` must not exist before; rank 0 leaves it to the caller to remove it.
  static Nccl over_file(std::string const& path, int rank, int size, std::chrono::milliseconds timeout = std::chrono::seconds(100)) {
    ncclUniqueId id;
    if (rank == 0) {
      id = unique_id();
      std::string const part = path + ".part";
      std::ofstream out(part, std::ios::binary);
      out.write(reinterpret_cast<char const*>(&id), sizeof(id));
      out.close();
      if (!out || std::rename(part.c_str(), path.c_str()) != 0) {
        throw Error(ErrorCode::config, text("nccl: cannot write the id file ", path));
      }
    } else {
      auto const end = std::chrono::steady_clock::now() + timeout;
      for (;;) {
        std::ifstream in(path, std::ios::binary);
        if (in.read(reinterpret_cast<char*>(&id), sizeof(id))) {
          break;
        }
        if (std::chrono::steady_clock::now() > end) {
          throw Error(ErrorCode::timeout, text("nccl: rank ", rank, " waited ", timeout.count(), " ms for the id file ", path));
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }
    }
    return Nccl(rank, size, id);
  }
  /// Collective bootstrap over anything that broadcasts bytes from rank 0 in host memory: `broadcast(void* data, std::size_t bytes)`.
  template <class Broadcast>
  static Nccl over(int rank, int size, Broadcast&& broadcast) {
    ncclUniqueId id{};
    if (rank == 0) {
      id = unique_id();
    }
    broadcast(static_cast<void*>(&id), sizeof(id));
    return Nccl(rank, size, id);
  }

  int rank() const { return rank_; }
  int size() const { return size_; }
  ncclComm_t handle() const { return comm_; }

  /// `n` bytes of every rank, in rank order, into out.
  void all_gather(void const* in, std::int64_t n, void* out, StreamType stream) {
    check(ncclAllGather(in, out, static_cast<std::size_t>(n), ncclInt8, comm_, stream), "ncclAllGather");
  }
  /// counts[r] bytes of rank r into out + offsets[r]; `n` is the own count.
  void all_gather_v(void const* in, std::int64_t n, void* out, std::int64_t const* counts, std::int64_t const* offsets, StreamType stream) {
    Group group(*this);
    for (int r = 0; r < size_; ++r) {
      if (counts[r] > 0) {
        void const* const from = r == rank_ ? in : nullptr;
        void* const to = static_cast<std::byte*>(out) + offsets[r];
        check(ncclBroadcast(from == nullptr ? to : from, to, static_cast<std::size_t>(r == rank_ ? n : counts[r]), ncclInt8, r, comm_,
                            stream),
              "ncclBroadcast");
      }
    }
    group.end();
  }
  void all_to_all_v(void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out,
                    std::int64_t const* out_counts, std::int64_t const* out_offsets, StreamType stream) {
    Group group(*this);
    for (int i = 0; i < size_; ++i) {
      int const to = (rank_ + i) % size_;
      int const from = (rank_ + size_ - i) % size_;
      if (in_counts[to] > 0) {
        check(ncclSend(static_cast<std::byte const*>(in) + in_offsets[to], static_cast<std::size_t>(in_counts[to]), ncclInt8, to, comm_,
                       stream),
              "ncclSend");
      }
      if (out_counts[from] > 0) {
        check(ncclRecv(static_cast<std::byte*>(out) + out_offsets[from], static_cast<std::size_t>(out_counts[from]), ncclInt8, from, comm_,
                       stream),
              "ncclRecv");
      }
    }
    group.end();
  }
  void broadcast(void* data, std::int64_t n, int root, StreamType stream) {
    check(ncclBroadcast(data, data, static_cast<std::size_t>(n), ncclInt8, root, comm_, stream), "ncclBroadcast");
  }
  /// Every rank's stream reaches this point before any goes on.
  void barrier(StreamType stream) {
    if (barrier_word_ == nullptr) {
      check_cuda(cudaMalloc(&barrier_word_, sizeof(float)), "cudaMalloc");
      check_cuda(cudaMemset(barrier_word_, 0, sizeof(float)), "cudaMemset");
    }
    check(ncclAllReduce(barrier_word_, barrier_word_, 1, ncclFloat, ncclSum, comm_, stream), "ncclAllReduce");
  }
  void all_reduce(float const* in, std::int64_t n, float* out, StreamType stream) {
    check(ncclAllReduce(in, out, static_cast<std::size_t>(n), ncclFloat, ncclSum, comm_, stream), "ncclAllReduce");
  }
  /// Rank r gets elements [offsets[r], offsets[r] + counts[r]) of the sum.
  void reduce_scatter_v(float const* in, std::int64_t const* counts, std::int64_t const* offsets, float* out, StreamType stream) {
    Group group(*this);
    for (int r = 0; r < size_; ++r) {
      if (counts[r] > 0) {
        check(ncclReduce(in + offsets[r], r == rank_ ? out : nullptr, static_cast<std::size_t>(counts[r]), ncclFloat, ncclSum, r, comm_,
                         stream),
              "ncclReduce");
      }
    }
    group.end();
  }

 private:
  /// Ends the NCCL group also when a call inside it throws.
  class Group {
   public:
    explicit Group(Nccl& owner) : owner_(owner) { owner.check(ncclGroupStart(), "ncclGroupStart"); }
    ~Group() {
      if (open_) {
        ncclGroupEnd();
      }
    }
    void end() {
      open_ = false;
      owner_.check(ncclGroupEnd(), "ncclGroupEnd");
    }

   private:
    Nccl& owner_;
    bool open_ = true;
  };
  void check(ncclResult_t result, char const* call) { detail::check_nccl(result, call, comm_); }

  ncclComm_t comm_ = nullptr;
  int rank_ = 0;
  int size_ = 1;
  void* barrier_word_ = nullptr;
};

}  // namespace moe::comm
