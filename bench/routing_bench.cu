// SPDX-License-Identifier: Apache-2.0
// bench/routing_bench.cu: the routing kernel with mapping, load counts and permutation, from a CUDA graph; microseconds per launch.
//
// A graph holds kLaunches calls over rotating logits, so a time is that of a call inside a captured model, launch gap included. Empty
// kernels in the launch shapes of 1, 128 and 4096 tokens are the floor. The result is compared with the host before anything is timed.
// --benchmark_format=json gives what scripts read; routing_peer.py times torch's softmax and topk in the same way.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "bench/checked.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/grouped_topk.hpp"
#include "moe/routing/softmax_topk.hpp"

namespace {

using namespace moe;
using namespace moe::routing;

constexpr int kLaunches = 64;
constexpr int kInputs = 8;

template <class T>
Buffer<T, space::cuda> on_device(std::vector<T> const& v) {
  Buffer<T, space::cuda> b(static_cast<std::int64_t>(v.size()));
  b.copy_from_host(v.data());
  return b;
}

/// Whether the device's ids and offsets of the first input equal the host's.
template <class Router>
bool agrees(Router const& router, std::vector<float> const& logits, std::int64_t rows, std::vector<std::int32_t> const& ids,
            std::vector<std::int64_t> const& offsets) {
  auto const n = static_cast<std::size_t>(rows * router.topk());
  std::vector<std::int32_t> want(n), sorted(n), inverse(n);
  std::vector<float> weights(n);
  std::vector<std::int64_t> want_offsets(offsets.size());
  router.select(RouteArgs<float>{.logits = make_rows<dynamic, float const>(logits.data(), rows, router.num_logits()),
                                 .num_valid_rows = rows,
                                 .topk_ids = make_rows(want.data(), rows, router.topk()),
                                 .topk_weights = make_rows(weights.data(), rows, router.topk())});
  Permutation permutation;
  permutation.num_local_experts = router.num_experts();
  permutation.expert_offsets = want_offsets.data();
  permutation.sorted_slots = sorted.data();
  permutation.inverse = inverse.data();
  if (!offsets.empty()) {
    permute_slots(make_rows<dynamic, std::int32_t const>(want.data(), rows, router.topk()), router.topk(), router.num_experts(), rows,
                  permutation);
  }
  return want == ids && (offsets.empty() || want_offsets == offsets);
}

/// Microseconds of one of kLaunches launches, from replays of their graph.
template <class Launch>
void time_graph(benchmark::State& state, CudaStream& stream, Launch const& launch) {
  CudaGraph const graph(stream, [&] {
    for (int i = 0; i < kLaunches; ++i) launch(i);
  });
  for (int i = 0; i < 3; ++i) graph.launch(stream);
  CudaEvent start;
  CudaEvent stop;
  for (auto _ : state) {
    start.record(stream);
    graph.launch(stream);
    stop.record(stream);
    state.SetIterationTime(static_cast<double>(stop.since(start)) * 1e-3 / kLaunches);
  }
}

__global__ void empty_kernel() {}

/// An empty kernel in the shape that the routing kernel would have.
void empty(benchmark::State& state) {
  CudaStream stream;
  auto const device = moe::device_facts();
  RoutingCapacity capacity = moe::routing::detail::measure_routing_capacity(&empty_kernel, device, 32);
  RoutingTuning const tuning = choose_routing_tuning(state.range(0), 256, capacity, true);
  time_graph(state, stream, [&](int) {
    moe::routing::detail::RoutingLaunch const launch(tuning, 0, stream);
    check_cuda(cudaLaunchKernelEx(&launch.config, &empty_kernel), "empty kernel");
  });
}

/// One graph of kLaunches calls; `permute`: with load counts, offsets, sorted slots and inverse.
template <class Router>
void routing(benchmark::State& state, Router const& router, bool permute) {
  std::int64_t const rows = state.range(0);
  int const width = router.num_logits();
  int const k = router.topk();
  std::mt19937 gen(1);
  std::normal_distribution<float> normal(0.0F, 1.5F);
  std::vector<Buffer<float, space::cuda>> inputs;
  std::vector<float> first;
  for (int i = 0; i < kInputs; ++i) {
    std::vector<float> z(static_cast<std::size_t>(rows * width));
    for (float& v : z) v = normal(gen);
    inputs.push_back(on_device(z));
    if (i == 0) first = z;
  }
  Buffer<std::int32_t, space::cuda> ids(rows * k), sorted(rows * k), inverse(rows * k), load(router.num_experts());
  Buffer<float, space::cuda> weights(rows * k);
  Buffer<std::int64_t, space::cuda> offsets(router.num_experts() + 1);
  auto const device = moe::device_facts();
  std::int64_t const bytes = routing_workspace_bytes(router.num_experts(), device.num_sms);
  Buffer<char, space::cuda> workspace(bytes);
  Memory<space::cuda>::fill(workspace.data(), 0, static_cast<std::size_t>(bytes));
  Memory<space::cuda>::fill(load.data(), 0, load.bytes());
  auto const call = [&](int input) {
    FusedRouting<float> f;
    f.args.logits = make_rows<dynamic, float const>(inputs[static_cast<std::size_t>(input)].data(), rows, width);
    f.args.num_valid_rows = rows;
    f.args.topk_ids = make_rows(ids.data(), rows, k);
    f.args.topk_weights = make_rows(weights.data(), rows, k);
    if (permute) {
      f.recorder.load_counter = load.data();
      f.permutation.num_local_experts = router.num_experts();
      f.permutation.expert_offsets = offsets.data();
      f.permutation.sorted_slots = sorted.data();
      f.permutation.inverse = inverse.data();
    }
    f.workspace = workspace.data();
    return f;
  };
  CudaStream stream;
  route_fused(router, call(0), stream);
  stream.synchronize();
  std::vector<std::int32_t> got(static_cast<std::size_t>(rows * k));
  std::vector<std::int64_t> got_offsets(permute ? static_cast<std::size_t>(router.num_experts()) + 1 : 0);
  ids.copy_to_host(got.data());
  if (permute) offsets.copy_to_host(got_offsets.data());
  if (!agrees(router, first, rows, got, got_offsets)) {
    moe_bench::skip_wrong(state, "the kernel disagrees with the host");
    return;
  }

  time_graph(state, stream, [&](int i) { route_fused(router, call(i % kInputs), stream); });
  state.SetBytesProcessed(state.iterations() * rows * (width * 4 + k * (permute ? 16 : 8)));
}

using Grouped = GroupedTopK<Scoring::sigmoid, GroupScore::top2_sum, Renormalize::yes>;
using Softmax = SoftmaxTopK<Renormalize::yes>;

void grouped(benchmark::State& state, bool permute) {
  routing(state, Grouped({.num_experts = 256, .topk = 8, .num_expert_group = 8, .topk_group = 4, .routed_scaling_factor = 2.5F}), permute);
}
void softmax(benchmark::State& state, int experts, int topk, bool permute) {
  routing(state, Softmax({.num_experts = experts, .topk = topk}), permute);
}

void configure(benchmark::internal::Benchmark* b) {
  b->Arg(1)->Arg(16)->Arg(128)->Arg(512)->Arg(2048)->Arg(4096)->Arg(16384)->UseManualTime()->Unit(benchmark::kMicrosecond);
}
BENCHMARK(empty)->Arg(1)->Arg(128)->Arg(4096)->UseManualTime()->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(grouped, e256_g8_k8_all, true)->Apply(configure);
BENCHMARK_CAPTURE(grouped, e256_g8_k8_ids_and_weights, false)->Apply(configure);
BENCHMARK_CAPTURE(softmax, e128_k8_all, 128, 8, true)->Apply(configure);
BENCHMARK_CAPTURE(softmax, e256_k8_all, 256, 8, true)->Apply(configure);
BENCHMARK_CAPTURE(softmax, e512_k10_all, 512, 10, true)->Apply(configure);

}  // namespace

int main(int argc, char** argv) {
  if (!moe_bench::initialize(argc, argv)) return moe_bench::kBadArguments;
  if (!has_device()) {
    std::printf("skipped: no GPU\n");
    return 77;
  }
  return moe_bench::run_benchmarks();
}
