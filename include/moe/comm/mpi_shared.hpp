// SPDX-License-Identifier: Apache-2.0
// comm/mpi_shared.hpp: a window of host memory that every rank of a node maps, through MPI-3 shared windows.
#pragma once

#include <mpi.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "moe/comm/host_window.hpp"
#include "moe/comm/mpi.hpp"

namespace moe::comm {

/// One rank's part of a window: zeroed host memory, parts of all ranks mapped. Construction is collective. Destruction frees the memory
/// if all ranks come to it within two seconds; otherwise, and after a failure, it waits for nobody and leaves the memory to the end of
/// the processes.
class MpiShared : public HostWindow {
 public:
  using Comm = Mpi;
  static constexpr char const* kName = "mpi_shared";
  struct Params {
    std::int64_t timeout_ms = 100'000;  ///< of each wait on a peer; 0 waits for ever
    MPI_Comm node = MPI_COMM_NULL;      ///< the ranks that share memory, in rank order; null: what MPI says. Borrowed.
  };

  /// `user_bytes` behind the control part, the same on all ranks. E_UNSUPPORTED naming the pair if some rank is on another node,
  /// E_CAPACITY if the memory cannot be had, E_MISMATCH if ranks want different sizes, E_TIMEOUT if a rank does not come.
  MpiShared(Mpi& comm, std::int64_t user_bytes, Params const& params) {
    if (comm.size() > kMaxWindowRanks) {
      throw Error(ErrorCode::unsupported, text("window: ", comm.size(), " ranks, at most ", kMaxWindowRanks));
    }
    std::int64_t const bytes = (user_bytes + static_cast<std::int64_t>(kWindowControlBytes) + kPage - 1) / kPage * kPage;
    agree(comm, bytes, capacity_error(comm, bytes));
    find_node(comm, params.node);
    try {
      map(comm, bytes, params.timeout_ms);
    } catch (...) {
      release_node();
      throw;
    }
  }
  MpiShared(Mpi& comm, std::int64_t user_bytes) : MpiShared(comm, user_bytes, Params{}) {}
  MpiShared(MpiShared const&) = delete;
  MpiShared& operator=(MpiShared const&) = delete;
  ~MpiShared() {
    int finalized = 0;
    MPI_Finalized(&finalized);
    if (leave_together() && finalized == 0) {
      MPI_Win_unlock_all(window_);
      MPI_Win_free(&window_);
      release_node();
    }
  }

 private:
  static constexpr std::int64_t kPage = 4096;
  static constexpr char const* kSharedFolder = "/dev/shm";

  // Why the memory of all ranks cannot be had on this node, if it is plain to see. A store into a full memory file system is a signal.
  static std::optional<Error> capacity_error(Mpi const& comm, std::int64_t bytes) {
    std::int64_t const total = bytes * comm.size();
    std::int64_t room = static_cast<std::int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
    char const* where = "of memory";
    struct statvfs shared{};
    if (access(kSharedFolder, W_OK) == 0 && statvfs(kSharedFolder, &shared) == 0) {
      auto const free_bytes = static_cast<std::int64_t>(shared.f_bavail) * static_cast<std::int64_t>(shared.f_frsize);
      if (free_bytes < room) {
        room = free_bytes;
        where = "free in /dev/shm";
      }
    }
    if (bytes < 0 || total > room) {
      return Error(ErrorCode::capacity, text("window: ", comm.size(), " parts of ", bytes, " bytes exceed the ", room, " bytes ", where));
    }
    return std::nullopt;
  }
  static void agree(Mpi& comm, std::int64_t bytes, std::optional<Error> const& refused) {
    std::array<std::int64_t, 2> const mine{bytes, refused ? 1 : 0};
    std::vector<std::array<std::int64_t, 2>> all(static_cast<std::size_t>(comm.size()));
    comm.set_phase("construction");
    comm.all_gather(mine.data(), sizeof mine, all.data(), {});
    if (refused) {
      throw Error(*refused);
    }
    for (int r = 0; r < comm.size(); ++r) {
      auto const& theirs = all[static_cast<std::size_t>(r)];
      if (theirs[0] != all[0][0]) {
        throw TransportError(ErrorCode::mismatch, comm.rank(), r, "construction", 0,
                             text("window: rank 0 wants ", all[0][0], " bytes, rank ", r, " wants ", theirs[0]));
      }
      if (theirs[1] != 0) {
        throw TransportError(ErrorCode::capacity, comm.rank(), r, "construction", 0, text("window: rank ", r, " has no memory for it"));
      }
    }
  }
  void find_node(Mpi& comm, MPI_Comm given) {
    if (given == MPI_COMM_NULL) {
      MPI_Comm_split_type(comm.handle(), MPI_COMM_TYPE_SHARED, comm.rank(), MPI_INFO_NULL, &node_);
      owns_node_ = true;
    } else {
      node_ = given;
    }
    int on_node = 0;
    MPI_Comm_size(node_, &on_node);
    if (on_node == comm.size()) {
      return;
    }
    // Every rank sees only a part, so every rank throws.
    int const missing = first_missing(comm);
    release_node();
    throw Error(ErrorCode::unsupported, text("window: rank ", comm.rank(), " shares no memory with rank ", missing,
                                             "; AllToAllV and AllGatherReduceScatter need none"));
  }
  int first_missing(Mpi& comm) const {
    MPI_Group all = MPI_GROUP_NULL;
    MPI_Group here = MPI_GROUP_NULL;
    MPI_Comm_group(comm.handle(), &all);
    MPI_Comm_group(node_, &here);
    int missing = -1;
    for (int r = 0; r < comm.size() && missing < 0; ++r) {
      int found = MPI_UNDEFINED;
      MPI_Group_translate_ranks(all, 1, &r, here, &found);
      missing = found == MPI_UNDEFINED ? r : -1;
    }
    MPI_Group_free(&all);
    MPI_Group_free(&here);
    return missing;
  }
  void map(Mpi& comm, std::int64_t bytes, std::int64_t timeout_ms) {
    MPI_Errhandler before = MPI_ERRORS_ARE_FATAL;
    MPI_Comm_get_errhandler(node_, &before);
    MPI_Comm_set_errhandler(node_, MPI_ERRORS_RETURN);
    void* base = nullptr;
    // One page more than is used, so that parts begin on a page wherever MPI puts them.
    int const code = MPI_Win_allocate_shared(bytes + kPage, 1, MPI_INFO_NULL, node_, &base, &window_);
    MPI_Comm_set_errhandler(node_, before);
    agree(comm, bytes,
          code == MPI_SUCCESS ? std::nullopt
                              : std::optional<Error>(Error(ErrorCode::capacity, text("window: MPI cannot share ", bytes, " bytes"))));
    MPI_Win_lock_all(MPI_MODE_NOCHECK, window_);
    std::array<char*, kMaxWindowRanks> parts{};
    for (int r = 0; r < comm.size(); ++r) {
      MPI_Aint part_bytes = 0;
      int unit = 0;
      void* part = nullptr;
      MPI_Win_shared_query(window_, r, &part_bytes, &unit, &part);
      auto const address = reinterpret_cast<std::uintptr_t>(part);
      parts[static_cast<std::size_t>(r)] =
          static_cast<char*>(part) + (kPage - static_cast<std::int64_t>(address % static_cast<std::uintptr_t>(kPage))) % kPage;
    }
    char* const mine = parts[static_cast<std::size_t>(comm.rank())];
    // Punching a hole gives zeros without touching pages that may never be used.
    if (madvise(mine, static_cast<std::size_t>(bytes), MADV_REMOVE) != 0) {
      std::memset(mine, 0, static_cast<std::size_t>(bytes));
    }
    attach(parts.data(), comm.rank(), comm.size(), static_cast<std::size_t>(bytes), timeout_ms);
    comm.barrier({});
    meet();
  }
  void release_node() noexcept {
    if (owns_node_) {
      MPI_Comm_free(&node_);
      owns_node_ = false;
    }
  }

  MPI_Comm node_ = MPI_COMM_NULL;
  bool owns_node_ = false;
  MPI_Win window_ = MPI_WIN_NULL;
};

}  // namespace moe::comm
