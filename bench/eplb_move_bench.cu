// SPDX-License-Identifier: Apache-2.0
// bench/eplb_move_bench.cu: what an asynchronous move of experts costs the steps beside it.
//
//   mpirun --bind-to none -n <GPUs> eplb_move_bench [--tokens 128] [--experts 32] [--layers 10] [--moves 5]
//
// One process per GPU, each with two cores or more: a thread moves the weights beside the one that serves, and mpirun alone binds two
// processes to a core each. A step is a chain of DeepSeek-V3-shaped layers in fp8 over LowLatency and HopperMasked. All of them compute
// with one set of weights, of which every rank's experts move to the next rank while steps go on. Wall time of a step, its part in the
// ranks' agreement, and device time of its forwards, without a move and while one is under way, but not of the step that commits, which
// also copies the weights; slowest rank, median over the steps. The outputs before and after are compared first: a wrong result makes the
// exit code 1. The goal is a difference under 5 %; docs/log/runner.md has what was measured.
#include <mpi.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "bench/arguments.hpp"
#include "bench/bench_report.hpp"
#include "bench/rank_gpu.hpp"
#include "moe/activation/activation.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/eplb/async_rearrangement.hpp"
#include "moe/eplb/map_tables.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "tests/numbers.hpp"

namespace {

using namespace moe;
using eplb::ExpertMaps;
using eplb::Table;
using Clock = std::chrono::steady_clock;

struct Config : LayerDefaults {
  static constexpr int hidden = 7168, intermediate = 2048;
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
using Fp8 = quantization::Fp8Block<>;
using Layer = ModularKernel<Config, routing::SoftmaxTopK<routing::Renormalize::yes>, Fp8, backends::LowLatency<comm::NcclSymmetric>,
                            experts::HopperMasked>;
using Store = experts::WeightStore<Config, Fp8, space::cuda>;
constexpr int kTopK = 8;

struct Options {
  int tokens = 128, experts = 32, layers = 10, moves = 5;  // experts: of a rank
};

/// Microseconds of each step.
struct Times {
  std::vector<double> wall, device, agreement;
};

class Bench {
 public:
  Bench(comm::Mpi& host, Options const& options)
      : host_(host),
        o_(options),
        tokens_(comm::Nccl::over_communicator(host, {.timeout_ms = 20'000})),
        weights_(comm::Nccl::over_communicator(host, {.timeout_ms = 20'000})),
        maps_(ExpertMaps::initial(1, o_.experts * host.size(), 0)),
        tables_(maps_),
        store_(o_.experts, Config::hidden, Config::intermediate, true),
        hidden_(o_.tokens * Config::hidden),
        output_(o_.tokens * Config::hidden),
        logits_(o_.tokens * num_experts()) {
    // Few different experts: drawing and quantising 44 million values takes the host a second.
    auto const w13 = moe_test::normal(host.rank(), std::int64_t{2} * Config::intermediate * Config::hidden, 0.012F);
    auto const w2 = moe_test::normal(host.rank() + 100, std::int64_t{Config::hidden} * Config::intermediate, 0.022F);
    store_.set_expert(0, w13.data(), w2.data());
    for (eplb::ExpertTensor const& t : eplb::expert_tensors(store_)) {
      for (std::int64_t s = 1; s < t.slots; ++s) {
        Memory<space::cuda>::copy_async(t.data + s * t.stride, t.data, static_cast<std::size_t>(t.bytes), nullptr);
      }
    }
    std::vector<bf16> x;
    for (float v : moe_test::normal(host.rank() + 200, hidden_.size())) x.push_back(from_float<bf16>(v));
    hidden_.copy_from_host(x.data());
    logits_.copy_from_host(moe_test::normal(host.rank() + 300, logits_.size()).data());
    check_cuda(cudaDeviceSynchronize(), "weights");
    for (int l = 0; l < o_.layers; ++l) {
      layers_.emplace_back(tokens_, store_.view(),
                           Layer::Params{.shape = {.num_experts = num_experts(), .topk = kTopK},
                                         .max_tokens_per_rank = o_.tokens,
                                         .placement = ExpertPlacement(num_experts(), host.size()),
                                         .router = {num_experts(), kTopK},
                                         .mapping = tables_.mapping(0, host.rank(), host.size()),
                                         .load = {tables_.load_counter(0)}});
    }
  }

  bool run() {
    eplb::WeightMover<comm::Nccl> mover(weights_, {eplb::expert_tensors(store_)}, o_.experts, {.timeout_ms = 20'000});
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    eplb::AsyncRearrangement<comm::Nccl> async(
        mover, {.timeout_ms = 20'000, .on_thread_start = [device] { check_cuda(cudaSetDevice(device), "cudaSetDevice"); }}, worker_);
    eplb::CommGroup<comm::Mpi> group(host_);
    Times before, during;
    for (int i = 0; i < 20; ++i) step(nullptr);
    std::vector<float> const want = output();
    int steps = 0;
    for (int move = 0; move < o_.moves; ++move) {
      for (int i = 0; i < 30; ++i) step(&before);
      Table<std::int32_t> next = maps_.physical_to_logical();
      std::rotate(next.flat().begin(), next.flat().begin() + o_.experts, next.flat().end());
      ExpertMaps const to(next, num_experts());
      async.begin(maps_, [to] { return to; });
      for (; async.pending(); ++steps) {
        Times one;
        step(&one);
        auto const start = Clock::now();
        async.step(
            group,
            [&](int layer, ExpertMaps const& maps) {
              maps_.set_layer(layer, maps);
              tables_.publish(layer, maps, stream_);
              for (Layer& l : layers_) l.weights_changed(stream_);
            },
            stream_);
        double const agreement = std::chrono::duration<double, std::micro>(Clock::now() - start).count();
        if (!async.pending()) break;  // the step of the commit also copies the weights
        during.wall.push_back(one.wall[0] + agreement);
        during.agreement.push_back(agreement);
        during.device.push_back(one.device[0]);
      }
      step(nullptr);
      if (!near(output(), want)) return false;
    }
    report(before, during, mover.stats().bytes_received);
    return true;
  }

 private:
  /// On which this process may run.
  static int cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 0;
  }
  int num_experts() const { return o_.experts * host_.size(); }
  void step(Times* times) {
    auto const start = Clock::now();
    begin_.record(stream_);
    for (Layer& layer : layers_) {
      layer.forward(make_rows<Config::hidden>(static_cast<bf16 const*>(hidden_.data()), o_.tokens, Config::hidden),
                    make_rows(static_cast<float const*>(logits_.data()), o_.tokens, num_experts()),
                    make_rows<Config::hidden>(output_.data(), o_.tokens, Config::hidden), {}, stream_);
    }
    end_.record(stream_);
    check_cuda(cudaStreamSynchronize(stream_), "step");
    layers_.front().check();
    if (times == nullptr) return;
    times->wall.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
    times->device.push_back(1000.0 * static_cast<double>(end_.since(begin_)));
  }
  std::vector<float> output() const {
    std::vector<bf16> host(static_cast<std::size_t>(output_.size()));
    output_.copy_to_host(host.data());
    std::vector<float> out;
    for (bf16 v : host) out.push_back(to_float(v));
    return out;
  }
  static bool near(std::vector<float> const& got, std::vector<float> const& want) {
    float largest = 0, worst = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      largest = std::max(largest, std::abs(want[i]));
      worst = std::max(worst, std::isfinite(got[i]) ? std::abs(got[i] - want[i]) : 1e30F);
    }
    if (largest > 0 && worst <= 0.02F * largest) return true;
    std::printf("wrong: off by %g, largest %g\n", static_cast<double>(worst), static_cast<double>(largest));
    return false;
  }
  void report(Times const& before, Times const& during, std::int64_t bytes) {
    double const steps = static_cast<double>(during.wall.size());
    double medians[] = {moe_bench::median_and_spread(before.wall).first, moe_bench::median_and_spread(before.device).first,
                        during.wall.empty() ? 0 : moe_bench::median_and_spread(during.wall).first,
                        during.device.empty() ? 0 : moe_bench::median_and_spread(during.device).first,
                        during.agreement.empty() ? 0 : moe_bench::median_and_spread(during.agreement).first};
    MPI_Allreduce(MPI_IN_PLACE, medians, 5, MPI_DOUBLE, MPI_MAX, host_.handle());
    if (host_.rank() != 0) return;
    std::printf("%d ranks, %d tokens, %d layers, %d experts a rank moved %d times, %.2f GB received a move, %.1f steps a move\n",
                host_.size(), o_.tokens, o_.layers, o_.experts, o_.moves, static_cast<double>(bytes) / 1e9 / o_.moves, steps / o_.moves);
    std::printf("wall   %9.1f us a step, %9.1f while experts move: %+.1f %%; %.1f of them in the agreement, %d cores a process\n",
                medians[0], medians[2], 100 * (medians[2] / medians[0] - 1), medians[4], cores());
    std::printf("device %9.1f us a step, %9.1f while experts move: %+.1f %%\n", medians[1], medians[3],
                100 * (medians[3] / medians[1] - 1));
  }

  comm::Mpi& host_;
  Options o_;
  comm::Nccl tokens_, weights_;
  CudaStream stream_, worker_;
  CudaEvent begin_, end_;
  ExpertMaps maps_;
  eplb::MapTables<space::cuda> tables_;
  Store store_;
  Buffer<bf16, space::cuda> hidden_, output_;
  Buffer<float, space::cuda> logits_;
  std::deque<Layer> layers_;
};

/// Throws BadArgument.
Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; i += 2) {
    std::string const name = moe_bench::known_name("option", argv[i], {"--tokens", "--experts", "--layers", "--moves"});
    int& value = name == "--tokens" ? o.tokens : name == "--experts" ? o.experts : name == "--layers" ? o.layers : o.moves;
    value = moe_bench::count(name, moe_bench::value_of(argc, argv, i));
  }
  return o;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  try {
    options = parse(argc, argv);
  } catch (moe_bench::BadArgument const& error) {
    return moe_bench::refuse("eplb_move_bench", error);
  }
  MPI_Init(&argc, &argv);
  int result = 1;
  {
    comm::Mpi host(MPI_COMM_WORLD);
    if (!moe_bench::take_gpu(host.rank(), host.size()) || host.size() < 2) {
      result = 77;
    } else {
      result = Bench(host, options).run() ? 0 : 1;
    }
  }
  MPI_Finalize();
  return result;
}
