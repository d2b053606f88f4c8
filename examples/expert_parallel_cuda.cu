// SPDX-License-Identifier: Apache-2.0
// examples/expert_parallel_cuda.cu: a layer on all GPUs of a node, for decode and for prefill: mpirun -n 4 example_expert_parallel_cuda
#include <mpi.h>

#include <moe/backends/window/device/high_throughput.cuh>
#include <moe/backends/window/device/low_latency.cuh>
#include <moe/comm/mpi.hpp>
#include <moe/experts/hopper_contiguous.hpp>
#include <moe/experts/hopper_masked.hpp>
#include <moe/moe.hpp>
#include <moe/routing/device/route.cuh>

using namespace moe;
struct Config : LayerDefaults {
  static constexpr int hidden = 512, intermediate = 256, num_experts = 32, topk = 4;
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
using Softmax = routing::SoftmaxTopK<routing::Renormalize::yes>;
using Fp8 = quantization::Fp8Block<>;
using Decode = ModularKernel<Config, Softmax, Fp8, backends::LowLatency<comm::NcclSymmetric>, experts::HopperMasked>;
using Prefill = ModularKernel<Config, Softmax, Fp8, backends::HighThroughput<comm::NcclSymmetric>, experts::HopperContiguous>;
std::vector<bf16> numbers(int seed, int count) {
  std::vector<bf16> out(static_cast<std::size_t>(count));
  for (int i = seed; bf16& v : out) v = from_float<bf16>(0.1F * std::sin(7.0F * static_cast<float>(i++)));
  return out;
}
template <class Layer>
std::vector<bf16> forward(comm::Nccl& comm, ExpertPlacement const& placement, WeightsOf<Config, Fp8> const& weights) {
  Layer layer(comm, weights, {.max_tokens_per_rank = 48, .placement = placement, .router = {32, 4}});
  Buffer<bf16, space::cuda> hidden(48 * 512), logits(48 * 32), output(48 * 512);
  hidden.copy_from_host(numbers(comm.rank(), 48 * 512).data()), logits.copy_from_host(numbers(comm.rank() + 8, 48 * 32).data());
  layer.forward(make_rows<512>(hidden.data(), 48, 512), make_rows<dynamic, bf16 const>(logits.data(), 48, 32),
                make_rows<512>(output.data(), 48, 512));  // enqueues: may be captured in a CUDA graph
  check_cuda(cudaDeviceSynchronize(), "forward");
  layer.exchange().check();  // what kernels reported: a rank that did not come, rows that did not fit
  std::vector<bf16> host(48 * 512);
  output.copy_to_host(host.data());
  return host;
}
int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  std::atexit([] { MPI_Finalize(); });
  comm::Mpi host(MPI_COMM_WORLD);
  int gpus = 0, at = 0;
  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus < host.size())
    return std::printf("skipped: %d ranks need a GPU each, found %d\n", host.size(), gpus), 77;
  check_cuda(cudaSetDevice(host.rank()), "cudaSetDevice");
  comm::Nccl comm = comm::Nccl::over_communicator(host, {});
  ExpertPlacement const placement(32, comm.size());
  experts::WeightStore<Config, Fp8, space::cuda> mine(placement.num_local(comm.rank()), 512, 256, true);
  for (int e : placement.local_to_physical(comm.rank())) mine.set_expert(at++, numbers(e, 512 * 512).data(), numbers(-e, 512 * 256).data());
  auto const a = forward<Decode>(comm, placement, mine.view()), b = forward<Prefill>(comm, placement, mine.view());
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < a.size(); ++i) norm += std::abs(to_float(b[i])), difference += std::abs(to_float(a[i]) - to_float(b[i]));
  std::printf("rank %d: mean output %.1e, decode and prefill differ by %.1e\n", comm.rank(), norm / 24576, difference / 24576);
  return difference < 0.02 * norm ? 0 : 1;
}
