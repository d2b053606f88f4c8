// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/choose_device.cpp: `--device cuda`: one GPU per rank.
#include <cuda_runtime_api.h>
#include <mpi.h>

#include "examples/moe/cuda/instances.hpp"
#include "moe/core/cuda_space.hpp"

namespace moe_tool {

void choose_device(Job const& job) {
  MPI_Comm node = MPI_COMM_NULL;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
  int rank = 0;
  int ranks = 1;
  MPI_Comm_rank(node, &rank);
  MPI_Comm_size(node, &ranks);
  MPI_Comm_free(&node);
  together(*job.comm, [&] {
    if (!moe::has_device()) {
      throw moe::Error(moe::ErrorCode::unsupported, "--device cuda: this machine has no usable GPU; use --device host");
    }
    int devices = 0;
    moe::check_cuda(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    if (ranks > devices) {
      throw moe::Error(moe::ErrorCode::unsupported,
                       moe::text("--device cuda: ", ranks, " ranks on one node, which has ", devices, " GPUs; each rank needs its own"));
    }
    moe::check_cuda(cudaSetDevice(rank), "cudaSetDevice");
  });
}

}  // namespace moe_tool
