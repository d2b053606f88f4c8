// SPDX-License-Identifier: Apache-2.0
// comm/mpi_transfer.hpp: the messages of one collective of comm::Mpi that is under way.
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moe::comm {

namespace detail {

/// Gives up the requests that are not done.
inline void cancel(std::vector<MPI_Request>& requests) {
  int finalized = 0;
  MPI_Finalized(&finalized);
  for (MPI_Request& request : requests) {
    if (finalized == 0 && request != MPI_REQUEST_NULL) {
      MPI_Cancel(&request);
      MPI_Request_free(&request);
    }
  }
}

}  // namespace detail

/// Started by Mpi::start_all_to_all_v() and ended by Mpi::finish(), of one Mpi object.
class MpiTransfer {
 public:
  /// Memory for the messages of `mpi`, a comm::Mpi.
  template <class Mpi>
  explicit MpiTransfer(Mpi const& mpi) {
    requests_.reserve(mpi.max_requests());
    peers_.reserve(mpi.max_requests());
  }
  MpiTransfer(MpiTransfer const&) = delete;
  MpiTransfer& operator=(MpiTransfer const&) = delete;
  ~MpiTransfer() { detail::cancel(requests_); }
  bool under_way() const { return under_way_; }

 private:
  friend class Mpi;
  std::vector<MPI_Request> requests_;
  std::vector<int> peers_;
  std::uint64_t round_ = 0;
  bool under_way_ = false;
};

}  // namespace moe::comm
