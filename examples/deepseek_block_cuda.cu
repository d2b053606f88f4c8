// SPDX-License-Identifier: Apache-2.0
// examples/deepseek_block_cuda.cu: an MoE block of a DeepSeek-V3 checkpoint, its experts on all GPUs of a node:
// mpirun -n 4 example_deepseek_block_cuda [checkpoint] [layer]
#include <mpi.h>

#include <filesystem>
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
struct Config : LayerDefaults {  // sizes and constants are those of the checkpoint
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
struct Parts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Shared = runner::shared::Dense<bf16>;
};
using Groups = routing::GroupedTopK<routing::Scoring::sigmoid, routing::GroupScore::top2_sum, routing::Renormalize::yes>;
// With quantization::Fp8Block<> instead of None the experts of the released checkpoint stay in fp8; None widens them to bf16.
using Block = Runner<ModularKernel<Config, Groups, quantization::None, backends::AllToAllV<comm::Nccl>, experts::HopperContiguous>, Parts>;

int main(int argc, char** argv) try {
  MPI_Init(&argc, &argv);
  std::atexit([] { MPI_Finalize(); });
  comm::Mpi host(MPI_COMM_WORLD);
  int gpus = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus < host.size())
    return std::printf("skipped: %d ranks need a GPU each, found %d\n", host.size(), gpus), 77;
  check_cuda(cudaSetDevice(host.rank()), "cudaSetDevice");
  comm::Nccl comm = comm::Nccl::over_communicator(host, {});
  std::filesystem::path const checkpoint = argc > 1 ? argv[1] : "tests/data/checkpoints/deepseek_v3_tiny";
  int const layer = argc > 2 ? std::stoi(argv[2]) : 1, rows = 64;
  auto block = load_runner<Block>(checkpoint, layer, comm, {.max_tokens_per_rank = rows});  // each rank reads its own experts
  std::int64_t const hidden = block.runner().hidden(), first = comm.rank() % 4 * rows * hidden;
  std::vector<bf16> x(static_cast<std::size_t>(rows * hidden), from_float<bf16>(0.5F)), y(x.size());
  std::vector<float> wanted;  // what transformers made of the rows, if the directory has it
  if (auto const file = checkpoint / "moe_io.safetensors"; std::filesystem::exists(file)) {
    io::SafetensorsFile const tensors(file);
    std::copy_n(tensors.read<bf16>(text("layers.", layer, ".moe_in")).begin() + first, x.size(), x.begin());
    wanted = tensors.read<float>(text("layers.", layer, ".moe_out_f32"));
  }
  Buffer<bf16, space::cuda> input(rows * hidden), output(rows * hidden);
  input.copy_from_host(x.data());
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  block.forward(make_rows<dynamic, bf16 const>(input.data(), rows, hidden), make_rows(output.data(), rows, hidden));
  block.runner().wait();
  output.copy_to_host(y.data());
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < y.size() && !wanted.empty(); ++i) {
    double const want = wanted[static_cast<std::size_t>(first) + i];
    error += std::pow(to_float(y[i]) - want, 2), norm += want * want;
  }
  std::printf("rank %d: %d of %d experts, output %f, %s\n", comm.rank(), block.placement().num_local(comm.rank()),
              block.placement().num_logical(), to_float(y[0]),
              wanted.empty() ? "not compared: no moe_io.safetensors" : text(std::sqrt(error / norm), " from transformers").c_str());
  return error <= 1e-3 * norm ? 0 : 1;
} catch (moe::Error const& error) {
  std::printf("%s\n", error.what());
  return 1;
}
