// SPDX-License-Identifier: Apache-2.0
// examples/moe/mpi_session.hpp: MPI for the length of a subcommand.
#pragma once

#include <mpi.h>

namespace moe_tool {

/// Initialises MPI and finalises it at the end. After a transport error the group is aborted instead, because a rank may be gone.
class MpiSession {
 public:
  explicit MpiSession(int threads = MPI_THREAD_FUNNELED) {
    int given = 0;
    MPI_Init_thread(nullptr, nullptr, threads, &given);
  }
  MpiSession(MpiSession const&) = delete;
  MpiSession& operator=(MpiSession const&) = delete;
  ~MpiSession() {
    if (!broken) MPI_Finalize();
  }
  bool broken = false;
};

}  // namespace moe_tool
