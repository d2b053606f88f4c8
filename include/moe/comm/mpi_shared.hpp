// SPDX-License-Identifier: Apache-2.0
// comm/mpi_shared.hpp: a window of host memory that every rank of a node maps.
#pragma once

#include <mpi.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "moe/comm/host_window.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/shared_segment.hpp"

namespace moe::comm {

/// One rank's part of a window: zeroed host memory, parts of all ranks mapped. Construction is collective. Destruction waits for no rank: a
/// part lives as long as any process maps it. MPI only carries the messages of the construction and frees nothing of the window, so a
/// survivor's MPI_Finalize does not wait for a rank that has ended.
class MpiShared : public HostWindow {
 public:
  using Comm = Mpi;
  static constexpr char const* kName = "mpi_shared";
  struct Params {
    MPI_Comm node = MPI_COMM_NULL;  ///< the ranks that share memory, in rank order; null: ask MPI. Borrowed
  };

  /// `user_bytes` follow the control part; the same on all ranks. Each wait uses the communicator's deadline. E_UNSUPPORTED naming the pair
  /// if some rank is on another node, E_CAPACITY if the memory cannot be allocated, E_MISMATCH if ranks ask for different sizes, E_TIMEOUT
  /// if a rank does not arrive.
  MpiShared(Mpi& comm, std::int64_t user_bytes, Params const& params) {
    if (comm.size() > kMaxWindowRanks) {
      throw Error(ErrorCode::unsupported, text("window: ", comm.size(), " ranks, at most ", kMaxWindowRanks));
    }
    std::int64_t const bytes = (user_bytes + static_cast<std::int64_t>(kWindowControlBytes) + kPage - 1) / kPage * kPage;
    agree(comm, bytes, capacity_error(comm, bytes));
    expect_one_node(comm, params.node);
    map(comm, bytes);
  }
  MpiShared(Mpi& comm, std::int64_t user_bytes) : MpiShared(comm, user_bytes, Params{}) {}
  MpiShared(MpiShared const&) = delete;
  MpiShared& operator=(MpiShared const&) = delete;

 private:
  static constexpr std::int64_t kPage = 4096;
  static constexpr char const* kSharedFolder = "/dev/shm";

  // The error if this node clearly lacks memory for all ranks. Checked first: a store into a full memory file system raises a signal.
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
    std::array<std::int64_t, 2> const mine{bytes, refused ? 1 + static_cast<std::int64_t>(refused->code()) : 0};
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
        auto const code = static_cast<ErrorCode>(theirs[1] - 1);
        throw TransportError(code, comm.rank(), r, "construction", 0,
                             text("window: rank ", r, code == ErrorCode::capacity ? " has no memory for it" : " cannot map all parts"));
      }
    }
  }
  /// E_UNSUPPORTED on every rank unless `given` holds all ranks; if null, the ranks that share memory according to MPI.
  static void expect_one_node(Mpi& comm, MPI_Comm given) {
    MPI_Comm node = given;
    if (given == MPI_COMM_NULL) {
      MPI_Comm_split_type(comm.handle(), MPI_COMM_TYPE_SHARED, comm.rank(), MPI_INFO_NULL, &node);
    }
    int on_node = 0;
    MPI_Comm_size(node, &on_node);
    int const missing = on_node == comm.size() ? -1 : first_missing(comm, node);  // each rank sees only its node, so every rank throws
    if (given == MPI_COMM_NULL) {
      MPI_Comm_free(&node);
    }
    if (missing >= 0) {
      throw Error(ErrorCode::unsupported, text("window: rank ", comm.rank(), " shares no memory with rank ", missing,
                                               "; AllToAllV and AllGatherReduceScatter need none"));
    }
  }
  static int first_missing(Mpi const& comm, MPI_Comm node) {
    MPI_Group all = MPI_GROUP_NULL;
    MPI_Group here = MPI_GROUP_NULL;
    MPI_Comm_group(comm.handle(), &all);
    MPI_Comm_group(node, &here);
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
  void map(Mpi& comm, std::int64_t bytes) {
    auto const size = static_cast<std::size_t>(comm.size());
    auto const part = static_cast<std::size_t>(bytes);
    parts_.resize(size);
    SharedSegment& own = parts_[static_cast<std::size_t>(comm.rank())];
    agree(comm, bytes, error_of([&] { own = SharedSegment::make(part); }));

    std::vector<SharedSegment::Name> names(size);
    comm.all_gather(own.name().data(), sizeof(SharedSegment::Name), names.data(), {});
    agree(comm, bytes, error_of([&] {
            for (std::size_t r = 0; r < size; ++r) {
              if (parts_[r].data() == nullptr) {
                parts_[r] = SharedSegment::open(names[r], part);
              }
            }
          }));
    own.unlink();

    std::array<char*, kMaxWindowRanks> base{};
    for (std::size_t r = 0; r < size; ++r) {
      base[r] = parts_[r].data();
    }
    attach(base.data(), comm.rank(), comm.size(), part, comm.timeout_ms());
    comm.barrier({});
    meet();
  }

  std::vector<SharedSegment> parts_;  // [R]
};

}  // namespace moe::comm
