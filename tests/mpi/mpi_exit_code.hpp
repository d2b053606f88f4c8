// SPDX-License-Identifier: Apache-2.0
// tests/mpi/mpi_exit_code.hpp: one result for all ranks: failed if one rank failed, skipped if all ranks skipped.
#pragma once

#include <mpi.h>

#include "exit_code.hpp"

namespace moe_test {

inline int exit_code_of_all_ranks(int mine) {
  int const bits[2] = {mine != 0 && mine != kSkipped, mine != kSkipped};
  int any[2] = {1, 1};
  MPI_Allreduce(bits, any, 2, MPI_INT, MPI_MAX, MPI_COMM_WORLD);
  return any[0] ? 1 : any[1] ? 0 : kSkipped;
}

}  // namespace moe_test
