// SPDX-License-Identifier: Apache-2.0
// bench/forward_host_bench.cu: what a forward costs on the host of one GPU while its stream is held: a block, its layer alone, the stages
// of the block, and floors of the same run: as many launches of an empty kernel as the block has kernels, with and without programmatic
// stream serialization, with and without 1 KiB of arguments, and one launch of the captured block. Results are checked before they are
// timed.
//
//   forward_host_bench [report.json]
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "bench/arguments.hpp"
#include "bench/bench_report.hpp"
#include "bench/random_experts.cuh"
#include "moe/activation/activation.hpp"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/core/cuda_graph.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/linear.cuh"
#include "moe/runner/device/row_kernels.cuh"
#include "moe/runner/device/side_stream.hpp"
#include "moe/runner/runner.hpp"
#include "tests/gpu/held_stream.cuh"

namespace {

using namespace moe;
using Cuda = space::cuda;
using moe_test::HeldStream;
using moe_test::TypedMemory;
constexpr int kRepeats = 200;

/// The experts of one rank of eight, and the shared expert.
struct DeepSeekV3 {
  static constexpr char const* kName = "deepseek_v3";
  struct Config : LayerDefaults {
    static constexpr int hidden = 7168, intermediate = 2048, num_experts = 32, topk = 8;
    using Act = bf16;
    using Weight = bf16;
    using Activation = activation::Silu;
  };
  using Quant = quantization::Fp8Block<>;
  struct Parts : RunnerDefaults {
    using Gate = runner::gate::Linear<float>;
    using Shared = runner::shared::Dense<bf16>;
  };
};
struct Qwen3 {
  static constexpr char const* kName = "qwen3_30b_a3b";
  struct Config : LayerDefaults {
    static constexpr int hidden = 2048, intermediate = 768, num_experts = 128, topk = 8;
    using Act = bf16;
    using Weight = bf16;
    using Activation = activation::Silu;
  };
  using Quant = quantization::None;
  struct Parts : RunnerDefaults {
    using Gate = runner::gate::Linear<float>;
  };
};

/// The host time of each stage of one forward.
class HostStages {
 public:
  void begin(Phase) { start_ = Clock::now(); }
  void end(Phase phase) {
    us_[static_cast<std::size_t>(phase)] += std::chrono::duration<double, std::micro>(Clock::now() - start_).count();
  }
  std::array<double, kNumPhases> const& us() const { return us_; }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_{};
  std::array<double, kNumPhases> us_{};
};

struct HostTime {
  double least = 0, median = 0, spread = 0;
};
HostTime host_time(std::vector<double> const& us) {
  auto const [median, spread] = moe_bench::median_and_spread(us);
  return {*std::min_element(us.begin(), us.end()), median, spread};
}

/// Microseconds of call() on the host while the stream in which it enqueues is held. E_STATE if it waited for the device.
template <class Call>
HostTime time_held(HeldStream& held, Call const& call) {
  for (int i = 0; i < 3; ++i) call();
  std::vector<double> us;
  for (int i = 0; i < kRepeats; ++i) {
    held.hold();
    auto const start = std::chrono::steady_clock::now();
    call();
    us.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
    if (!held.release()) throw Error(ErrorCode::state, "the call returned when the stream was no longer held");
  }
  return host_time(us);
}

struct Arguments {
  char bytes[1024];
};
__global__ void empty_kernel() {}
__global__ void empty_kernel_of_arguments(Arguments const __grid_constant__) {}

template <class... Args>
void launch_empty(void (*kernel)(Args...), std::size_t count, bool programmatic, cudaStream_t stream, Args const&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  for (std::size_t i = 0; i < count; ++i) check_cuda(cudaLaunchKernelEx(&config, kernel, args...), "empty_kernel");
}

/// A model's block with random weights.
template <class Model>
class Block {
 public:
  using Config = typename Model::Config;
  using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
  using Layer = ModularKernel<Config, Router, typename Model::Quant, backends::NoExpertParallel<Cuda>, experts::HopperContiguous>;
  using R = Runner<Layer, typename Model::Parts>;
  static constexpr std::int64_t kHidden = Config::hidden, kExperts = Config::num_experts, kMostRows = 128;

  Block()
      : experts_(kHidden, Config::intermediate, Config::num_experts, 1),
        shared_(kHidden, Config::intermediate, 2),
        gate_(kExperts * kHidden),
        x_(kMostRows * kHidden),
        y_(kMostRows * kHidden),
        logits_(kMostRows * kExperts),
        runner_(self_, experts_.template view<Config>(), params()) {
    moe_test::fill_normal<<<256, 256>>>(gate_.data(), static_cast<long long>(gate_.size()), 3, 1.0F / std::sqrt(float{kHidden}));
    moe_test::fill_normal<<<256, 256>>>(x_.data(), static_cast<long long>(x_.size()), 4, 1.0F);
    moe_test::fill_normal<<<256, 256>>>(logits_.data(), static_cast<long long>(logits_.size()), 5, 1.0F);
    check_cuda(cudaDeviceSynchronize(), "inputs");
  }

  template <class Probe>
  void forward(std::int64_t rows, cudaStream_t stream, Probe&& probe) {
    runner_.forward(x(rows), y(rows), {}, stream, probe);
  }
  void forward(std::int64_t rows, cudaStream_t stream) { forward(rows, stream, NoProbe{}); }
  void layer_forward(std::int64_t rows, cudaStream_t stream) {
    runner_.layer().forward(x<Config::hidden>(rows), make_rows(static_cast<float const*>(logits_.data()), rows, kExperts),
                            y<Config::hidden>(rows), {}, stream);
  }
  /// The output of a call.
  template <class Call>
  std::vector<__nv_bfloat16> output_of(std::int64_t rows, cudaStream_t stream, Call const& call) {
    y_.fill_bytes(0xFF);  // NaN
    check_cuda(cudaDeviceSynchronize(), "fill");
    call();
    check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    std::vector<__nv_bfloat16> out = y_.download();
    out.resize(static_cast<std::size_t>(rows * kHidden));
    return out;
  }

 private:
  template <int Cols = dynamic>
  Rows<bf16 const, Cols> x(std::int64_t rows) const {
    return make_rows<Cols>(reinterpret_cast<bf16 const*>(x_.data()), rows, kHidden);
  }
  template <int Cols = dynamic>
  Rows<bf16, Cols> y(std::int64_t rows) const {
    return make_rows<Cols>(reinterpret_cast<bf16*>(y_.data()), rows, kHidden);
  }
  typename R::Params params() {
    typename R::Params p{.layer = {.max_tokens_per_rank = kMostRows,
                                   .placement = ExpertPlacement(Config::num_experts, 1),
                                   .router = {Config::num_experts, Config::topk}}};
    p.gate.weight = make_rows(static_cast<float const*>(gate_.data()), kExperts, kHidden);
    if constexpr (runner::detail::kPresent<typename Model::Parts::Shared>) shared_.set(p.shared);
    return p;
  }

  moe_bench::RandomExperts<typename Model::Quant> experts_;
  moe_bench::RandomShared shared_;
  TypedMemory<float> gate_;
  TypedMemory<__nv_bfloat16> x_, y_;
  TypedMemory<float> logits_;
  comm::Self<Cuda> self_;
  R runner_;
};

/// Whether all values are finite, and some are not zero.
bool plausible(std::vector<__nv_bfloat16> const& values) {
  auto const at = [](__nv_bfloat16 v) { return __bfloat162float(v); };
  return std::all_of(values.begin(), values.end(), [&](auto v) { return std::isfinite(at(v)); }) &&
         std::any_of(values.begin(), values.end(), [&](auto v) { return at(v) != 0.0F; });
}

/// Prints and reports the times of one number of rows. False for a wrong result.
template <class Model>
bool measure(Block<Model>& block, std::int64_t rows, moe_bench::Report& report) {
  CudaStream stream;
  auto const forward = [&] { block.forward(rows, stream); };
  auto const layer = [&] { block.layer_forward(rows, stream); };
  moe_test::GraphNodes const nodes = moe_test::graph_nodes(stream, forward), of_layer = moe_test::graph_nodes(stream, layer);
  CudaGraph const graph(stream, forward);
  auto const launch_graph = [&] { graph.launch(stream); };
  auto const want = block.output_of(rows, stream, forward), replayed = block.output_of(rows, stream, launch_graph);
  if (!plausible(want) || std::memcmp(want.data(), replayed.data(), want.size() * sizeof want[0]) != 0) {
    std::printf("%s, %ld rows: WRONG: a value is not finite, all are zero, or the graph gives other bits\n", Model::kName, rows);
    return false;
  }

  HeldStream held(stream);
  std::printf("%s, %ld rows: %zu kernels and %zu other nodes; the layer alone: %zu and %zu\n", Model::kName, rows, nodes.kernels,
              nodes.others, of_layer.kernels, of_layer.others);
  auto const say = [&](char const* what, HostTime const& t) {
    std::printf("  %-48s least %6.2f us, median %6.2f us\n", what, t.least, t.median);
    report.add({std::string(Model::kName) + "/" + std::to_string(rows) + "/" + what,
                t.median,
                t.spread,
                {{"least_us", t.least}, {"kernels", static_cast<double>(nodes.kernels)}, {"others", static_cast<double>(nodes.others)}}});
  };
  say("forward", time_held(held, forward));
  say("layer.forward", time_held(held, layer));

  std::vector<std::array<double, kNumPhases>> stages;
  time_held(held, [&] {
    HostStages probe;
    block.forward(rows, stream, probe);
    stages.push_back(probe.us());
  });
  for (std::size_t phase = 0; phase < kNumPhases; ++phase) {
    std::vector<double> us;
    for (auto const& stage : stages) us.push_back(stage[phase]);
    if (us.back() > 0) say((std::string("stage ") + std::string(name(static_cast<Phase>(phase)))).c_str(), host_time(us));
  }

  for (bool const programmatic : {true, false}) {
    char const* const how = programmatic ? ", programmatic" : "";
    say((std::string("floor: empty kernels") + how).c_str(),
        time_held(held, [&] { launch_empty(&empty_kernel, nodes.kernels, programmatic, stream); }));
    say((std::string("floor: empty kernels of 1 KiB") + how).c_str(),
        time_held(held, [&] { launch_empty(&empty_kernel_of_arguments, nodes.kernels, programmatic, stream, Arguments{}); }));
  }
  runner::SideStream<Cuda> side;
  say("floor: fork and join of a side stream", time_held(held, [&] {
        side.fork(stream);
        side.join(stream);
      }));
  say("floor: launch of the captured forward", time_held(held, launch_graph));
  std::fflush(stdout);
  return true;
}

template <class Model>
bool measure_model(moe_bench::Report& report) {
  Block<Model> block;
  bool good = true;
  for (std::int64_t const rows : {1, 16, 128}) good = measure(block, rows, report) && good;
  return good;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2) return moe_bench::refuse("forward_host_bench", moe_bench::BadArgument(moe::text(argv[2], ": it takes one file name")));
  moe_bench::Report report("forward_host_bench");
  bool good = measure_model<DeepSeekV3>(report);
  good = measure_model<Qwen3>(report) && good;
  if (argc > 1) good = report.write(argv[1]) && good;
  return good ? 0 : 1;
}
