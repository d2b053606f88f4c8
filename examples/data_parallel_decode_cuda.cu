// SPDX-License-Identifier: Apache-2.0
// examples/data_parallel_decode_cuda.cu: data-parallel ranks decode on a GPU each: a block over LowLatency windows, in a CUDA graph for
// each padded batch size, large batches in two halves: mpirun -n 4 example_data_parallel_decode_cuda
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <moe/backends/window/device/low_latency.cuh>
#include <moe/comm/mpi.hpp>
#include <moe/experts/hopper_masked.hpp>
#include <moe/moe.hpp>
#include <moe/routing/device/route.cuh>
#include <moe/runner/device/captured_sizes.hpp>
#include <moe/runner/device/linear.cuh>
#include <moe/runner/device/row_kernels.cuh>
#include <moe/runner/device/two_queues.hpp>
#include <moe/runner/runner.hpp>
#include <random>
#include <vector>

using namespace moe;
constexpr int kHidden = 512, kIntermediate = 256, kExperts = 32, kTopK = 4, kSequences = 32;
struct Config : LayerDefaults {
  static constexpr int hidden = kHidden, intermediate = kIntermediate, num_experts = kExperts, topk = kTopK;
  static constexpr bool batch_invariant = true;  // a row has the same bits in any batch
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
struct Parts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using DualBatch = runner::dual_batch::Halves;
};
using Softmax = routing::SoftmaxTopK<routing::Renormalize::yes>;
using Fp8 = quantization::Fp8Block<>;
using Block = Runner<ModularKernel<Config, Softmax, Fp8, backends::LowLatency<comm::NcclSymmetric>, experts::HopperMasked>, Parts>;

template <class T>
std::vector<T> normal(int seed, int count, float deviation) {
  std::mt19937 random(static_cast<unsigned>(seed));
  std::vector<T> out(static_cast<std::size_t>(count));
  for (T& v : out) v = from_float<T>(std::normal_distribution<float>(0.0F, deviation)(random));
  return out;
}
/// The step after the block, instead of a model's other layers: the residual sum, scaled to a mean square of 1. One warp a row.
__global__ void advance(bf16* hidden, bf16 const* output, std::int32_t const* live) {
  int const row = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x);
  if (row >= *live) return;  // padding
  float v[kHidden / 32], square = 0;
  for (int i = 0; i < kHidden / 32; ++i) {
    v[i] = to_float(hidden[row * kHidden + 32 * i + lane]) + to_float(output[row * kHidden + 32 * i + lane]);
    square += v[i] * v[i];
  }
  for (int other = 16; other > 0; other /= 2) square += __shfl_xor_sync(~0U, square, other);
  for (int i = 0; i < kHidden / 32; ++i) hidden[row * kHidden + 32 * i + lane] = from_float<bf16>(v[i] * rsqrtf(square / kHidden + 1e-6F));
}
/// Decodes one row a sequence until no rank has any left. Returns what is left in the rows.
std::vector<bf16> decode(comm::Nccl& comm, Block& block, bool graphs) {
  CudaStream stream;
  Buffer<bf16, space::cuda> hidden(kSequences * kHidden), output(hidden.size());
  Buffer<std::int32_t, space::cuda> live(1);
  hidden.copy_from_host(normal<bf16>(200 + comm.rank(), kSequences * kHidden, 1.0F).data());
  Memory<space::cuda>::fill(live.data(), 0, live.bytes());  // capturing runs each size once: that must not advance
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  auto const step = [&](std::int64_t rows, cudaStream_t s) {
    block.forward(make_rows<dynamic, bf16 const>(hidden.data(), rows, kHidden), make_rows(output.data(), rows, kHidden), {}, s);
    if (rows > 0) advance<<<static_cast<unsigned>(rows), 32, 0, s>>>(hidden.data(), output.data(), live.data());
  };
  runner::CapturedSizes<space::cuda> captured;
  std::vector<std::int64_t> const sizes{4, 16, kSequences};
  if (graphs) captured.capture(comm, sizes, capture_obstacle(block), step);
  for (int left = kSequences - 5 * comm.rank(), most = left;; --left) {  // a sequence ends in each step; ranks end at different times
    int const rows = std::max(left, 0);
    MPI_Allreduce(&rows, &most, 1, MPI_INT, MPI_MAX, MPI_COMM_WORLD);  // every rank replays the same size
    if (most == 0) break;
    Memory<space::cuda>::copy_from_host_async(live.data(), &rows, sizeof rows, stream);
    graphs ? static_cast<void>(captured.replay(most, stream)) : step(rows, stream);
    block.wait(stream);
  }
  std::vector<bf16> rows(static_cast<std::size_t>(hidden.size()));
  hidden.copy_to_host(rows.data());
  return rows;
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
  ExpertPlacement const placement(kExperts, comm.size());
  experts::WeightStore<Config, Fp8, space::cuda> mine(placement.num_local(comm.rank()), kHidden, kIntermediate, true);
  for (int e : placement.local_to_physical(comm.rank())) {
    mine.set_expert(at++, normal<bf16>(e, 2 * kIntermediate * kHidden, 0.05F).data(),
                    normal<bf16>(e + kExperts, kHidden * kIntermediate, 0.05F).data());
  }
  Buffer<float, space::cuda> gate(kExperts * kHidden);
  gate.copy_from_host(normal<float>(99, kExperts * kHidden, 0.05F).data());
  Block::Params params{.layer = {.max_tokens_per_rank = kSequences, .placement = placement, .router = {kExperts, kTopK}}};
  params.gate = {make_rows<dynamic, float const>(gate.data(), kExperts, kHidden)};
  params.dual_batch.min_rows = 16;  // the sizes of 16 and 32 rows run in halves
  Block block(comm, mine.view(), params);
  auto const a = decode(comm, block, true);
  block.decide_dual_batch(false);
  auto const b = decode(comm, block, false);  // called, with the rows that there are, not in halves
  bool const finite = std::all_of(a.begin(), a.end(), [](bf16 v) { return std::isfinite(to_float(v)); });
  bool const equal = finite && std::memcmp(a.data(), b.data(), a.size() * sizeof(bf16)) == 0;
  std::printf("rank %d: row 0 begins with %.3f; graphs and calls: %s\n", comm.rank(), to_float(a[0]), equal ? "same bits" : "DIFFERENT");
  return equal ? 0 : 1;
}
