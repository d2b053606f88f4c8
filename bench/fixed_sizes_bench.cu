// SPDX-License-Identifier: Apache-2.0
// bench/fixed_sizes_bench.cu: the routing kernel with sizes that are known at compile time beside the same with run-time sizes, on one GPU,
// taking turns. Both write the same ids and weights, or nothing is timed. A time is that of a call in a graph of 64, in microseconds:
// the median of the rounds, and the spread from the least to the most.
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "bench/bench_report.hpp"
#include "moe/core/buffer.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "moe/routing/topk_softmax.hpp"

namespace {

using namespace moe;
using namespace moe::routing;

constexpr int kLaunches = 64, kInputs = 8, kRounds = 15;

/// A router's configuration with these sizes and nothing beside the routed experts.
template <class Config, int E, int K>
struct FixedSizes : Config {
  static constexpr int num_experts = E;
  static constexpr int topk = K;
  static constexpr int num_fused_shared = 0;
  static constexpr int num_zero_experts = 0;
  static constexpr int num_joint_shared = 0;
  MOE_HD static constexpr int num_logits() { return E; }
  MOE_HD static constexpr int num_slots() { return K; }
};
template <class Config>
struct Router : RowRouter<Config> {
  explicit Router(Config const& c) : RowRouter<Config>(c) {}
};

/// A captured graph of kLaunches calls.
class Graph {
 public:
  template <class Launch>
  Graph(CudaStream& stream, Launch const& launch) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    for (int i = 0; i < kLaunches; ++i) launch(i);
    check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    check_cuda(cudaGraphInstantiate(&executable_, graph, 0), "cudaGraphInstantiate");
    cudaGraphDestroy(graph);
  }
  Graph(Graph const&) = delete;
  Graph& operator=(Graph const&) = delete;
  ~Graph() { cudaGraphExecDestroy(executable_); }
  /// Microseconds of a call, of 20 replays.
  double time() {
    start_.record(stream_);
    for (int i = 0; i < 20; ++i) check_cuda(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch");
    stop_.record(stream_);
    return static_cast<double>(stop_.since(start_)) * 1e3 / (20 * kLaunches);
  }

 private:
  CudaStream& stream_;
  cudaGraphExec_t executable_ = nullptr;
  CudaEvent start_, stop_;
};

struct Outputs {
  Buffer<std::int32_t, space::cuda> ids, sorted, inverse, load;
  Buffer<float, space::cuda> weights;
  Buffer<std::int64_t, space::cuda> offsets;
  Buffer<char, space::cuda> workspace;
  Outputs(std::int64_t rows, int experts, int k, int num_sms)
      : ids(rows * k),
        sorted(rows * k),
        inverse(rows * k),
        load(experts),
        weights(rows * k),
        offsets(experts + 1),
        workspace(routing_workspace_bytes(experts, num_sms)) {
    Memory<space::cuda>::fill(workspace.data(), 0, workspace.bytes());
    Memory<space::cuda>::fill(load.data(), 0, load.bytes());
  }
  std::vector<std::int32_t> host_ids() const {
    std::vector<std::int32_t> out(static_cast<std::size_t>(ids.size()));
    ids.copy_to_host(out.data());
    return out;
  }
  std::vector<float> host_weights() const {
    std::vector<float> out(static_cast<std::size_t>(weights.size()));
    weights.copy_to_host(out.data());
    return out;
  }
};

template <class Config, int E, int K>
bool compare(char const* name, std::int64_t rows, bool permute) {
  Config run_time{};
  run_time.num_experts = E, run_time.topk = K;
  FixedSizes<Config, E, K> fixed{};
  static_cast<Config&>(fixed) = run_time;
  std::mt19937 gen(1);
  std::normal_distribution<float> normal(0.0F, 1.5F);
  std::vector<Buffer<float, space::cuda>> inputs;
  for (int i = 0; i < kInputs; ++i) {
    std::vector<float> z(static_cast<std::size_t>(rows * E));
    for (float& v : z) v = normal(gen);
    inputs.emplace_back(rows * E);
    inputs.back().copy_from_host(z.data());
  }
  CudaStream stream;
  auto const device = moe::routing::detail::routing_device();
  Outputs a(rows, E, K, device.num_sms), b(rows, E, K, device.num_sms);
  auto const call = [&](Outputs& o, int input) {
    FusedRouting<float> f;
    f.args.logits = make_rows<dynamic, float const>(inputs[static_cast<std::size_t>(input % kInputs)].data(), rows, E);
    f.args.num_valid_rows = rows;
    f.args.topk_ids = make_rows(o.ids.data(), rows, K);
    f.args.topk_weights = make_rows(o.weights.data(), rows, K);
    if (permute) {
      f.recorder.load_counter = o.load.data();
      f.permutation.num_local_experts = E;
      f.permutation.expert_offsets = o.offsets.data();
      f.permutation.sorted_slots = o.sorted.data();
      f.permutation.inverse = o.inverse.data();
    }
    f.workspace = o.workspace.data();
    return f;
  };
  Router<Config> const router_a(run_time);
  Router<FixedSizes<Config, E, K>> const router_b(fixed);
  Graph at_run_time(stream, [&](int i) { route_fused(router_a, call(a, i), stream); });
  Graph at_compile_time(stream, [&](int i) { route_fused(router_b, call(b, i), stream); });
  std::vector<double> times_a, times_b;
  at_run_time.time(), at_compile_time.time();
  if (a.host_ids() != b.host_ids() || a.host_weights() != b.host_weights()) {
    std::printf("%-22s %5ld rows: the two disagree\n", name, static_cast<long>(rows));
    return false;
  }
  for (int round = 0; round < kRounds; ++round) times_a.push_back(at_run_time.time()), times_b.push_back(at_compile_time.time());
  auto const [ma, sa] = moe_bench::median_and_spread(times_a);
  auto const [mb, sb] = moe_bench::median_and_spread(times_b);
  std::printf("routing %-18s %5ld rows %-7s run time %6.2f us (spread %.2f), fixed %6.2f us (spread %.2f): %+.1f %%\n", name,
              static_cast<long>(rows), permute ? "all" : "ids", ma, sa, mb, sb, 100 * (mb / ma - 1));
  return true;
}
template <class Config, int E, int K>
bool compare_all(char const* name) {
  bool ok = true;
  for (std::int64_t rows : {1, 16, 128, 512, 4096}) {
    for (bool permute : {false, true}) ok = compare<Config, E, K>(name, rows, permute) && ok;
  }
  return ok;
}

}  // namespace

int main() {
  if (!has_device()) {
    std::printf("skipped: no GPU\n");
    return 77;
  }
  using Softmax = moe::routing::detail::SoftmaxTopKConfig<Renormalize::yes>;
  bool const qwen = compare_all<Softmax, 128, 8>("Qwen3-30B-A3B");
  bool const gpt_oss = compare_all<moe::routing::detail::TopKSoftmaxConfig, 128, 4>("gpt-oss-120b");
  return qwen && gpt_oss ? 0 : 1;
}
