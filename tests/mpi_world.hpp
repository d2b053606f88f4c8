// SPDX-License-Identifier: Apache-2.0
// tests/mpi_world.hpp: this process among all ranks of the program.
#pragma once

#include <mpi.h>

namespace moe_test {

inline int world_rank() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}
inline int world_size() {
  int size = 1;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

}  // namespace moe_test
