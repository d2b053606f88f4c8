// SPDX-License-Identifier: Apache-2.0
// bench/runner_dual_batch_bench.cu: a chain of ten blocks in one graph, whole batches against halves (runner/dual_batch.hpp).
// kUsage has its options.
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <random>

#include "bench/bench_report.hpp"
#include "bench/rank_experts.cuh"
#include "moe/activation/activation.hpp"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
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
#include "moe/runner/device/two_queues.hpp"
#include "moe/runner/runner.hpp"
#include "tests/gpu/hopper_reference.cuh"

namespace {

using namespace moe;
using moe_bench::count;
using moe_bench::counts;
using moe_bench::Names;
using moe_bench::worst_of;
using moe_test::TypedMemory;
using Window = comm::NcclSymmetric;
constexpr int kHidden = 7168, kIntermediate = 2048, kTopK = 8, kChain = 10, kRepeats = 9;

/// What --help prints.
constexpr char const* kUsage = R"(A chain of ten blocks in one graph, whole batches against halves, one process per GPU, microseconds.

  mpirun -n <GPUs> runner_dual_batch_bench [--option value]…      with these defaults:

  --experts 32                                of each rank
  --tokens 128,1024,4096                      of each rank
  --backends high_throughput,low_latency      low_latency up to 1024 tokens
  --workers 0,116                             multiprocessors of the experts of a half; 0: all
  --blocks 16                                 thread blocks of the exchange
  --json FILE

Blocks of DeepSeek-V3's shape, fp8: gate, routed experts, one shared expert, sum. The outputs of halves are first compared with those of the
whole batch. Slowest rank, median.)";

struct Config : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
using Quant = quantization::Fp8Block<>;
using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
struct Parts : RunnerDefaults {
  using Gate = runner::gate::Linear<bf16>;
  using Shared = runner::shared::Dense<bf16>;
  using DualBatch = runner::dual_batch::Halves;
};

struct Options {
  int experts = 32;
  std::vector<int> tokens{128, 1024, 4096};
  Names backends{"high_throughput", "low_latency"};  // low_latency up to 1024 tokens: its window grows with them
  std::vector<int> workers{0, 116};
  int blocks = 0;  // of the exchange; 0: its default
  std::string json;
};
class Bench {
 public:
  Bench(comm::Mpi& host, Options const& options)
      : host_(host),
        comm_(comm::Nccl::over_communicator(host, {.timeout_ms = 20'000})),
        options_(options),
        experts_(kHidden, kIntermediate, options.experts, static_cast<std::uint64_t>(1000 * host.rank())),
        shared_(kHidden, kIntermediate, 6),
        gate_(static_cast<std::size_t>(options.experts) * static_cast<std::size_t>(host.size()) * kHidden),
        report_("runner_dual_batch_bench") {
    moe_test::fill_normal<<<2048, 256>>>(reinterpret_cast<__nv_bfloat16*>(gate_.data()), static_cast<long long>(gate_.size()), 5,
                                         1.0F / std::sqrt(static_cast<float>(kHidden)));
    check_cuda(cudaDeviceSynchronize(), "gate");
  }

  void run() {
    for (std::string const& name : options_.backends) {
      for (int const tokens : options_.tokens) {
        for (int const workers : options_.workers) {
          try {
            if (name == "high_throughput") {
              measure<backends::HighThroughput<Window>, experts::HopperContiguous>(tokens, workers);
            } else {
              if (tokens > 1024) continue;
              measure<backends::LowLatency<Window>, experts::HopperMasked>(tokens, workers);
            }
          } catch (TransportError const&) {
            throw;
          } catch (Error const& e) {
            good_ = false;
            if (host_.rank() == 0) std::printf("%s/%d: %s\n", name.c_str(), tokens, e.what());
          }
        }
      }
    }
  }
  bool write() const { return host_.rank() != 0 || options_.json.empty() || report_.write(options_.json); }
  bool good() const { return good_; }

 private:
  template <class Backend, class Experts>
  void measure(int tokens, int workers) {
    using Layer = ModularKernel<Config, Router, Quant, Backend, Experts>;
    using Block = Runner<Layer, Parts>;
    int const num_experts = options_.experts * host_.size();
    typename Block::Params p{.layer = {.shape = {kHidden, kIntermediate, num_experts, kTopK, false},
                                       .max_tokens_per_rank = tokens,
                                       .placement = ExpertPlacement(num_experts, host_.size()),
                                       .router = {num_experts, kTopK}}};
    p.layer.experts.expected_rows = std::max(1, tokens * kTopK / options_.experts);
    if (options_.blocks > 0) p.layer.backend.blocks = options_.blocks;
    p.gate.weight = make_rows(static_cast<bf16 const*>(gate_.data()), num_experts, kHidden);
    shared_.set(p.shared);
    p.shared.activation = {activation::Kind::silu, {}};
    p.shared.overlap_rows = 0;
    p.dual_batch = {.min_rows = 2, .expert_workers = workers};
    Block block(comm_, experts_.view<Config>(), p);

    std::vector<bf16> x;
    std::mt19937 random(static_cast<unsigned>(31 + host_.rank()));
    std::normal_distribution<float> normal;
    std::vector<float> some(65536);
    for (float& v : some) v = normal(random);
    for (std::int64_t i = 0; i < std::int64_t{tokens} * kHidden; ++i) x.push_back(from_float<bf16>(some[random() % some.size()]));
    TypedMemory<bf16> input(x.size()), output(x.size());
    input.upload(x);
    auto const forward = [&] {
      block.forward(make_rows(static_cast<bf16 const*>(input.data()), tokens, kHidden), make_rows(output.data(), tokens, kHidden), {},
                    stream_);
    };
    auto const result = [&](bool halves) {
      output.fill_bytes(0xff);
      block.decide_dual_batch(halves);
      forward();
      stream_.synchronize();
      block.check();
      return output.download();
    };
    auto const whole = result(false);
    auto const halved = result(true);
    double error = 0, norm = 0;
    for (std::size_t i = 0; i < whole.size(); ++i) {
      error += std::pow(static_cast<double>(to_float(whole[i])) - static_cast<double>(to_float(halved[i])), 2);
      norm += std::pow(static_cast<double>(to_float(whole[i])), 2);
    }
    double const relative = worst_of(std::isfinite(error / norm) ? std::sqrt(error / norm) : 1e9);
    std::string const name = text(Backend::kName, "/", tokens, "/workers", workers);
    if (relative > 5e-3) {
      good_ = false;
      if (host_.rank() == 0) std::printf("%-34s halves differ by %.1e: WRONG, not timed\n", name.c_str(), relative);
      return;
    }
    double us[2];
    for (bool const halves : {false, true}) {
      block.decide_dual_batch(halves);
      us[halves ? 1 : 0] = time(forward, [&] { block.check(); });
    }
    if (host_.rank() == 0) {
      std::printf("%-34s whole %8.1f us, halves %8.1f us (%+.1f %%), differ by %.1e\n", name.c_str(), us[0], us[1],
                  100.0 * (us[1] / us[0] - 1.0), relative);
      std::fflush(stdout);
    }
    for (bool const halves : {false, true}) {
      report_.add({text(name, halves ? "/halves" : "/whole"),
                   us[halves ? 1 : 0],
                   0.0,
                   {{"ranks", host_.size()}, {"tokens", tokens}, {"experts", num_experts}, {"workers", workers}}});
    }
  }
  /// Microseconds of one of ten blocks in a graph: the slowest rank, the median.
  template <class Call, class Check>
  double time(Call const& call, Check const& check) {
    CudaGraph const graph(stream_, [&] {
      for (int i = 0; i < kChain; ++i) call();
    });
    std::vector<double> us;
    for (int repeat = -2; repeat < kRepeats; ++repeat) {
      host_.barrier({});
      graph.launch(stream_);  // ranks start together
      begin_.record(stream_);
      graph.launch(stream_);
      end_.record(stream_);
      stream_.synchronize();
      check();
      double const slowest = worst_of(1e3 * static_cast<double>(end_.since(begin_)) / kChain);
      if (repeat >= 0) us.push_back(slowest);
    }
    return moe_bench::median_and_spread(us).first;
  }

  comm::Mpi& host_;
  comm::Nccl comm_;
  Options options_;
  moe_bench::RandomExperts<Quant> experts_;
  moe_bench::RandomShared shared_;
  TypedMemory<bf16> gate_;
  CudaStream stream_;
  CudaEvent begin_, end_;
  moe_bench::Report report_;
  bool good_ = true;
};

void set_option(Options& options, std::string const& key, std::string const& value) {
  moe_bench::known_name("option", key, {"--experts", "--tokens", "--backends", "--workers", "--blocks", "--json"});
  if (key == "--experts") {
    options.experts = count(key, value);
  } else if (key == "--tokens") {
    options.tokens = counts(key, value);
  } else if (key == "--backends") {
    options.backends = moe_bench::known_names(key, value, {"high_throughput", "low_latency"});
  } else if (key == "--workers") {
    options.workers = counts(key, value, 0);
  } else if (key == "--blocks") {
    options.blocks = count(key, value, 0);
  } else {
    options.json = value;
  }
}

}  // namespace

int main(int argc, char** argv) {
  return moe_bench::ranks_main<Bench, Options>(argc, argv, {"runner_dual_batch_bench", kUsage}, set_option);
}
