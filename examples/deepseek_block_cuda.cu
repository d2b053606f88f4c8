// SPDX-License-Identifier: Apache-2.0
// examples/deepseek_block_cuda.cu: a DeepSeek-V3 block on all GPUs: mpirun -n 4 example_deepseek_block_cuda [checkpoint] [layer]
#include <moe/backends/collective/device/all_to_all_v.cuh>
#include <moe/comm/mpi.hpp>
#include <moe/comm/nccl.hpp>
#include <moe/experts/hopper_contiguous.hpp>
#include <moe/models/load_runner_cuda.hpp>
#include <moe/moe.hpp>
#include <moe/routing/device/route.cuh>
#include <moe/runner/device/dense_shared.cuh>
#include <moe/runner/device/row_kernels.cuh>
using namespace moe;
struct Parts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Shared = runner::shared::Dense<bf16>;
};
using Config = models::RuntimeLayer<bf16, bf16>;  // sizes and constants are those of the checkpoint
using Groups = routing::GroupedTopK<routing::Scoring::sigmoid, routing::GroupScore::top2_sum, routing::Renormalize::yes>;
// With quantization::Fp8Block<> instead of None the experts of the released checkpoint stay in fp8; None widens them to bf16.
using Block = Runner<ModularKernel<Config, Groups, quantization::None, backends::AllToAllV<comm::Nccl>, experts::HopperContiguous>, Parts>;
int main(int argc, char** argv) try {
  MPI_Init(&argc, &argv);
  std::atexit([] { MPI_Finalize(); });
  comm::Mpi host(MPI_COMM_WORLD);
  if (int gpus = 0; cudaGetDeviceCount(&gpus) != cudaSuccess || gpus < host.size()) return std::printf("skipped: %d GPUs\n", gpus), 77;
  check_cuda(cudaSetDevice(host.rank()), "cudaSetDevice");
  comm::Nccl comm = comm::Nccl::over_communicator(host, {});
  char const* const checkpoint = argc > 1 ? argv[1] : "tests/data/checkpoints/deepseek_v3_tiny";
  auto block = load_runner<Block>(checkpoint, argc > 2 ? std::stoi(argv[2]) : 1, comm, {.max_tokens_per_rank = 64});
  std::int64_t const rows = 64, hidden = block.runner().hidden();
  std::vector<bf16> values(static_cast<std::size_t>(rows * hidden), from_float<bf16>(0.5F));
  Buffer<bf16, space::cuda> x(rows * hidden), y(rows * hidden);
  x.copy_from_host(values.data());
  block.forward(make_rows<dynamic, bf16 const>(x.data(), rows, hidden), make_rows(y.data(), rows, hidden));
  block.runner().wait();
  y.copy_to_host(values.data());
  std::printf("rank %d: %d experts, output %f\n", comm.rank(), block.placement().num_local(comm.rank()), to_float(values[0]));
} catch (std::exception const& error) {
  return std::printf("%s\n", error.what()), 1;
}
