// SPDX-License-Identifier: Apache-2.0
// bench/runner_overlap_bench.cu: what the shared experts of a block add to it: graphs of ten blocks without them, with them before the
// layer, between the halves of its exchange, and on a side stream.
//
//   mpirun -n <GPUs> runner_overlap_bench [BLOCKS]      thread blocks of the exchange's kernels
//
// DeepSeek-V3: hidden 7168, experts of 2048, 8 a token, 32 experts a rank in fp8; one shared expert of 2048 in bf16. One rank: without
// exchange; more: LowLatency. All variants must have the same bits.
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "bench/rank_gpu.hpp"
#include "moe/activation/activation.hpp"
#include "moe/backends/collective/no_expert_parallel.cuh"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/row_kernels.cuh"
#include "moe/runner/runner.hpp"
#include "tests/gpu/hopper_reference.cuh"

namespace {

using namespace moe;
using Cuda = space::cuda;
using moe_test::DeviceArray;
using Fp8 = quantization::Fp8Block<>;
using Window = comm::NcclSymmetric;
constexpr int kHidden = 7168, kInner = 2048, kTopK = 8, kLocal = 32, kBlocks = 10, kSets = 2;

struct Config : LayerDefaults {
  static constexpr int hidden = kHidden, intermediate = kInner, topk = kTopK;
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
struct Parts : RunnerDefaults {
  using Shared = runner::shared::Dense<bf16>;
};
using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;

using Code = typename Fp8::template WeightCode<bf16>;

/// Random experts of this rank.
struct Experts {
  DeviceArray<Code> w13{static_cast<std::size_t>(kLocal) * 2 * kInner * kHidden}, w2{static_cast<std::size_t>(kLocal) * kHidden * kInner};
  DeviceArray<float> s13{static_cast<std::size_t>(kLocal * Fp8::weight_scale_count(2 * kInner, kHidden))},
      s2{static_cast<std::size_t>(kLocal * Fp8::weight_scale_count(kHidden, kInner))};
  explicit Experts(std::uint64_t seed) {
    fill(w13, seed + 1);
    fill(w2, seed + 2);
    moe_test::fill_positive<<<256, 256>>>(s13.data(), static_cast<long long>(s13.size()), seed + 3, 5e-5F, 15e-5F);
    moe_test::fill_positive<<<256, 256>>>(s2.data(), static_cast<long long>(s2.size()), seed + 4, 1e-4F, 3e-4F);
    check_cuda(cudaDeviceSynchronize(), "weights");
  }
  static void fill(DeviceArray<Code> const& to, std::uint64_t seed) {
    moe_test::fill_normal<<<2048, 256>>>(reinterpret_cast<__nv_fp8_e4m3*>(to.data()), static_cast<long long>(to.size()), seed, 100.0F);
  }
  WeightsOf<Config, Fp8> view() const {
    WeightsOf<Config, Fp8> w{};
    auto set = [](auto& m, auto const& codes, auto const& scales, std::int64_t rows, std::int64_t cols) {
      m.codes = make_blocks(static_cast<Code const*>(codes.data()), kLocal, rows, cols);
      m.scales = make_rows(static_cast<float const*>(scales.data()), kLocal, Fp8::weight_scale_count(rows, cols));
      m.rows = rows;
      m.cols = cols;
    };
    set(w.w13, w13, s13, 2 * kInner, kHidden);
    set(w.w2, w2, s2, kHidden, kInner);
    return w;
  }
};
/// Random shared experts.
struct Shared {
  DeviceArray<__nv_bfloat16> w13{static_cast<std::size_t>(2) * kInner * kHidden}, w2{static_cast<std::size_t>(kHidden) * kInner};
  explicit Shared(std::uint64_t seed) {
    moe_test::fill_normal<<<1024, 256>>>(w13.data(), static_cast<long long>(w13.size()), seed, 0.012F);
    moe_test::fill_normal<<<1024, 256>>>(w2.data(), static_cast<long long>(w2.size()), seed + 1, 0.022F);
  }
  template <class Params>
  void set(Params& p) const {
    p.count = 1;
    p.intermediate = kInner;
    p.weights.w13 = {make_blocks(static_cast<bf16 const*>(w13.data()), 1, 2 * kInner, kHidden), {}, {}, 2 * kInner, kHidden};
    p.weights.w2 = {make_blocks(static_cast<bf16 const*>(w2.data()), 1, kHidden, kInner), {}, {}, kHidden, kInner};
  }
};

/// Microseconds of one of ten bodies of a graph: the slowest rank's median.
double graph_time(std::function<void(int, cudaStream_t)> const& body) {
  CudaStream stream;
  body(0, stream);
  stream.synchronize();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  for (int i = 0; i < kBlocks; ++i) body(i, stream);
  check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "cudaGraphInstantiate");
  std::vector<double> times;
  CudaEvent begin, end;
  for (int i = 0; i < 25; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    begin.record(stream);
    check_cuda(cudaGraphLaunch(exec, stream), "cudaGraphLaunch");
    end.record(stream);
    double us = 1000.0 * end.since(begin) / kBlocks, slowest = 0;
    MPI_Allreduce(&us, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    if (i >= 5) times.push_back(slowest);
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

/// One number of tokens a rank, all variants. False if they differ in bits.
template <class Backend, class ExpertsPolicy, class Comm>
bool measure(Comm& comm, std::int64_t m, typename Backend::Params const& backend = {}) {
  using R = Runner<ModularKernel<Config, Router, Fp8, Backend, ExpertsPolicy>, Parts>;
  int const ranks = comm.size(), experts = kLocal * ranks;
  Experts const routed(static_cast<std::uint64_t>(100 * comm.rank()));
  std::vector<std::unique_ptr<Shared>> sets;
  for (int i = 0; i < kSets; ++i) sets.push_back(std::make_unique<Shared>(static_cast<std::uint64_t>(1000 + i)));
  DeviceArray<__nv_bfloat16> x(static_cast<std::size_t>(m * kHidden)), y(x.size());
  DeviceArray<float> logits(static_cast<std::size_t>(m * experts));
  moe_test::fill_normal<<<256, 256>>>(x.data(), static_cast<long long>(x.size()), 7 + static_cast<std::uint64_t>(comm.rank()), 1.0F);
  moe_test::fill_positive<<<256, 256>>>(logits.data(), static_cast<long long>(logits.size()), 9 + static_cast<std::uint64_t>(comm.rank()),
                                        -2.0F, 2.0F);
  check_cuda(cudaDeviceSynchronize(), "inputs");

  std::vector<std::vector<__nv_bfloat16>> outputs;
  auto const time = [&](bool shared, bool between, std::int64_t beside) {
    std::vector<std::unique_ptr<R>> runners;
    for (int i = 0; i < (shared ? kSets : 1); ++i) {
      typename R::Params p{.layer = {.shape = {.num_experts = experts},
                                     .max_tokens_per_rank = m,
                                     .placement = ExpertPlacement(experts, ranks, PlacementStrategy::linear),
                                     .router = {experts, kTopK},
                                     .backend = backend}};
      p.layer.experts.expected_rows = static_cast<int>(std::max<std::int64_t>(1, m * ranks * kTopK / experts));
      if (shared) sets[static_cast<std::size_t>(i)]->set(p.shared);
      p.shared.overlap_rows = beside;
      p.overlap_shared = between;
      runners.push_back(std::make_unique<R>(comm, routed.view(), p));
    }
    double const us = graph_time([&](int i, cudaStream_t stream) {
      runners[static_cast<std::size_t>(i) % runners.size()]->forward(make_rows(static_cast<bf16 const*>(x.data()), m, kHidden),
                                                                     make_rows(static_cast<float const*>(logits.data()), m, experts),
                                                                     make_rows(static_cast<bf16*>(y.data()), m, kHidden), {}, stream);
    });
    if (shared) outputs.push_back(y.download());
    return us;
  };
  double const none = time(false, false, 0), before = time(true, false, 0), between = time(true, true, 0), side = time(true, true, m);
  CudaStream stream;
  Arena<Cuda> arena;
  std::vector<std::unique_ptr<runner::device::DenseShared<bf16>>> alone;
  for (auto const& set : sets) {
    runner::device::DenseSharedParams<bf16> p;
    struct {
      int count;
      std::int64_t intermediate;
      ExpertWeights<bf16, float> weights;
    } part{};
    set->set(part);
    p.weights = part.weights;
    alone.push_back(std::make_unique<runner::device::DenseShared<bf16>>(p, kHidden, m, arena));
  }
  double const only = graph_time([&](int i, cudaStream_t s) {
    alone[static_cast<std::size_t>(i) % alone.size()]->run(make_rows(static_cast<bf16 const*>(x.data()), m, kHidden), {}, s);
  });
  bool same = true;
  for (auto const& out : outputs) same = same && std::memcmp(out.data(), outputs[0].data(), out.size() * sizeof out[0]) == 0;
  if (comm.rank() == 0) {
    auto const share = [&](double us) { return 100.0 * (us - none) / only; };
    std::printf(
        "%s, %d ranks, %4ld tokens: block %8.2f us, shared alone %6.2f; more with it before %6.2f (%3.0f %%), between %6.2f (%3.0f %%), "
        "beside %6.2f (%3.0f %%)%s\n",
        Backend::kName, ranks, m, none, only, before - none, share(before), between - none, share(between), side - none, share(side),
        same ? "" : "; THE BITS DIFFER");
    std::fflush(stdout);
  }
  return same;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  bool good = true;
  {
    comm::Mpi host(MPI_COMM_WORLD, {.timeout_ms = 30'000});
    if (moe_bench::take_gpu(host.rank(), host.size())) {
      if (host.size() == 1) {
        comm::Self<Cuda> self;
        for (std::int64_t const m : {16, 128, 256}) {
          good = measure<backends::NoExpertParallel<Cuda>, experts::HopperContiguous>(self, m) && good;
        }
      } else {
        comm::Nccl comm = comm::Nccl::over_communicator(host, {.timeout_ms = 30'000});
        backends::LowLatency<Window>::Params params{};
        if (argc > 1) params.blocks = std::atoi(argv[1]);
        for (std::int64_t const m : {16, 128}) good = measure<backends::LowLatency<Window>, experts::HopperMasked>(comm, m, params) && good;
      }
    }
  }
  MPI_Finalize();
  return good ? 0 : 1;
}
