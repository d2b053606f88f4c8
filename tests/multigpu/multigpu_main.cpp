// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/multigpu_main.cpp: one rank, one GPU. Exits with 77 (skipped) on every rank where the node has fewer GPUs than ranks.
// With MOE_TEST_HOSTS set, NCCL takes every rank for one on a host of its own; such ranks may share a GPU.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <cstdio>

#include "mpi/mpi_exit_code.hpp"
#include "several_hosts.hpp"

namespace {

/// Ranks other than 0 print only their failures.
class Failures : public testing::EmptyTestEventListener {
 public:
  explicit Failures(int rank) : rank_(rank) {}
  void OnTestPartResult(testing::TestPartResult const& result) override {
    if (result.failed()) {
      std::printf("rank %d: %s:%d: Failure\n%s\n", rank_, result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(),
                  result.message());
      std::fflush(stdout);
    }
  }

 private:
  int rank_;
};

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  testing::InitGoogleTest(&argc, argv);
  MPI_Comm node;
  MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &node);
  int rank = 0, size = 0, devices = 0;
  MPI_Comm_rank(node, &rank);
  MPI_Comm_size(node, &size);
  if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
  bool const hosts = moe_test::on_several_hosts();
  if (hosts) moe_test::pretend_own_host(rank);
  int const needed = hosts ? 1 : size;
  int result = 0;
  if (devices < needed) {
    if (rank == 0) std::printf("skipped: %d ranks need %d GPUs, found %d\n", size, needed, devices);
    result = moe_test::kSkipped;
  } else {
    if (rank != 0) {  // one report, and the failures of the others
      auto& listeners = testing::UnitTest::GetInstance()->listeners();
      delete listeners.Release(listeners.default_result_printer());
      listeners.Append(new Failures(rank));
    }
    cudaSetDevice(hosts ? rank % devices : rank);
    int const mine = moe_test::exit_code(RUN_ALL_TESTS());
    if (mine != 0 && mine != moe_test::kSkipped) std::printf("rank %d failed\n", rank);
    result = moe_test::exit_code_of_all_ranks(mine);
  }
  MPI_Comm_free(&node);
  MPI_Finalize();
  return result;
}
