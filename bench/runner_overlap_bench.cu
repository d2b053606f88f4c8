// SPDX-License-Identifier: Apache-2.0
// bench/runner_overlap_bench.cu: what the shared experts of a block add to it: graphs of ten blocks without them, with them before the
// layer, between the halves of its exchange, and on a side stream.
//
//   mpirun -n <GPUs> runner_overlap_bench [BLOCKS]      thread blocks of the exchange's kernels
//
// DeepSeek-V3: hidden 7168, experts of 2048, 8 a token, 32 experts a rank in fp8; one shared expert of 2048, in bf16 and in fp8. One rank:
// without exchange; more: LowLatency. All orders must have the same bits.
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "bench/arguments.hpp"
#include "bench/bench_report.hpp"
#include "bench/rank_experts.cuh"
#include "bench/rank_gpu.hpp"
#include "moe/activation/activation.hpp"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/row_kernels.cuh"
#include "moe/runner/device/stored_shared.hpp"
#include "moe/runner/runner.hpp"
#include "tests/gpu/hopper_reference.cuh"

namespace {

using namespace moe;
using Cuda = space::cuda;
using moe_bench::RandomShared;
using moe_test::TypedMemory;
using Fp8 = quantization::Fp8Block<>;
using Window = comm::NcclSymmetric;
constexpr int kHidden = 7168, kInner = 2048, kTopK = 8, kLocal = 32, kBlocks = 10, kSets = 2;

struct Config : LayerDefaults {
  static constexpr int hidden = kHidden, intermediate = kInner, topk = kTopK;
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
using Dense = runner::shared::Dense<bf16>;
using Stored = runner::shared::Stored<experts::HopperContiguous, bf16, Fp8>;
template <class SharedPolicy>
struct Parts : RunnerDefaults {
  using Shared = SharedPolicy;
};
/// Random weights of one shared expert.
template <class Shared>
struct SharedSet;
template <>
struct SharedSet<Dense> {
  static constexpr char const* kName = "bf16";
  explicit SharedSet(std::uint64_t seed) : weights(kHidden, kInner, seed) {}
  void set(Dense::Params& p) const { weights.set(p); }
  RandomShared weights;
};
template <>
struct SharedSet<Stored> {
  static constexpr char const* kName = "fp8";
  explicit SharedSet(std::uint64_t seed) : weights(kHidden, kInner, 1, seed) {}
  void set(Stored::Params& p) const {
    p.count = 1;
    p.intermediate = kInner;
    p.stored = weights.view<runner::shared::ConfigOf<bf16, bf16>>();
  }
  moe_bench::RandomExperts<Fp8> weights;
};
using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;

/// Microseconds of one of ten bodies of a graph: the slowest rank's median.
double graph_time(std::function<void(int, cudaStream_t)> const& body) {
  CudaStream stream;
  body(0, stream);
  stream.synchronize();
  CudaGraph const graph(stream, [&] {
    for (int i = 0; i < kBlocks; ++i) body(i, stream);
  });
  std::vector<double> times;
  CudaEvent begin, end;
  for (int i = 0; i < 25; ++i) {
    MPI_Barrier(MPI_COMM_WORLD);
    begin.record(stream);
    graph.launch(stream);
    end.record(stream);
    double const slowest = moe_bench::worst_of(1000.0 * static_cast<double>(end.since(begin)) / kBlocks);
    if (i >= 5) times.push_back(slowest);
  }
  return moe_bench::median_and_spread(times).first;
}

/// One number of tokens a rank, all variants. False if they differ in bits.
template <class Shared, class Backend, class ExpertsPolicy, class Comm>
bool measure(Comm& comm, std::int64_t m, typename Backend::Params const& backend = {}) {
  using R = Runner<ModularKernel<Config, Router, Fp8, Backend, ExpertsPolicy>, Parts<Shared>>;
  using Set = SharedSet<Shared>;
  int const ranks = comm.size(), experts = kLocal * ranks;
  moe_bench::RandomExperts<Fp8> const routed(kHidden, kInner, kLocal, static_cast<std::uint64_t>(100 * comm.rank()));
  std::vector<std::unique_ptr<Set>> sets;
  for (int i = 0; i < kSets; ++i) sets.push_back(std::make_unique<Set>(static_cast<std::uint64_t>(1000 + 10 * i)));
  TypedMemory<__nv_bfloat16> x(static_cast<std::size_t>(m * kHidden)), y(x.size());
  TypedMemory<float> logits(static_cast<std::size_t>(m * experts));
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
      runners.push_back(std::make_unique<R>(comm, routed.view<Config>(), p));
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
  using Part = typename Shared::template Part<Cuda, bf16>;
  std::vector<std::unique_ptr<Part>> alone;
  for (auto const& set : sets) {
    typename Shared::Params p;
    set->set(p);
    p.overlap_rows = 0;
    alone.push_back(std::make_unique<Part>(p, runner::Sizes{kHidden, kHidden, m}, arena));
  }
  double const only = graph_time([&](int i, cudaStream_t s) {
    alone[static_cast<std::size_t>(i) % alone.size()]->run(make_rows(static_cast<bf16 const*>(x.data()), m, kHidden), {}, s);
  });
  bool same = true;
  for (auto const& out : outputs) same = same && std::memcmp(out.data(), outputs[0].data(), out.size() * sizeof out[0]) == 0;
  if (comm.rank() == 0) {
    auto const share = [&](double us) { return 100.0 * (us - none) / only; };
    std::printf(
        "%s, %d ranks, %4ld tokens, shared in %s: block %8.2f us, shared alone %6.2f; more with it before %6.2f (%3.0f %%), between %6.2f "
        "(%3.0f %%), "
        "beside %6.2f (%3.0f %%)%s\n",
        Backend::kName, ranks, m, Set::kName, none, only, before - none, share(before), between - none, share(between), side - none,
        share(side), same ? "" : "; THE BITS DIFFER");
    std::fflush(stdout);
  }
  return same;
}

}  // namespace

int main(int argc, char** argv) {
  backends::LowLatency<Window>::Params params{};
  try {
    if (argc > 1) params.blocks = moe_bench::count("blocks", argv[1]);
  } catch (moe_bench::BadArgument const& error) {
    return moe_bench::refuse("runner_overlap_bench", error);
  }
  MPI_Init(&argc, &argv);
  bool good = true;
  {
    comm::Mpi host(MPI_COMM_WORLD, {.timeout_ms = 30'000});
    if (moe_bench::take_gpu(host.rank(), host.size())) {
      if (host.size() == 1) {
        comm::Self<Cuda> self;
        for (std::int64_t const m : {16, 128, 256}) {
          good = measure<Dense, backends::NoExpertParallel<Cuda>, experts::HopperContiguous>(self, m) && good;
          good = measure<Stored, backends::NoExpertParallel<Cuda>, experts::HopperContiguous>(self, m) && good;
        }
      } else {
        comm::Nccl comm = comm::Nccl::over_communicator(host, {.timeout_ms = 30'000});
        for (std::int64_t const m : {16, 128}) {
          good = measure<Dense, backends::LowLatency<Window>, experts::HopperMasked>(comm, m, params) && good;
          good = measure<Stored, backends::LowLatency<Window>, experts::HopperMasked>(comm, m, params) && good;
        }
      }
    }
  }
  MPI_Finalize();
  return good ? 0 : 1;
}
