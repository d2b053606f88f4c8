// SPDX-License-Identifier: Apache-2.0
// bench/hopper_layer_bench.cu: checks the Hopper experts against float32, then times whole layers: CUDA graphs, rotated inputs and weights.
//
//   hopper_layer_bench check [seed]
//   hopper_layer_bench time <bf16|fp8_block> <shape|all> <tokens,tokens,…> [tile_rows] [max_splits]
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "moe/experts/hopper/launch.cuh"
#include "moe/experts/hopper_contiguous.cuh"
#include "tests/gpu/hopper_reference.cuh"

namespace {

using namespace moe::hopper;
using namespace moe_test;

std::map<std::string, LayerShape> const kShapes{{"mixtral-8x7b", {8, 4096, 14336, 2}},
                                                {"qwen3-30b-a3b", {128, 2048, 768, 8}},
                                                {"qwen3-235b-a22b", {128, 4096, 1536, 8}},
                                                {"deepseek-v3-ep8rank", {32, 7168, 2048, 1}},
                                                {"gpt-oss-120b", {128, 2880, 2880, 4}}};

int failures = 0;

void check_one(char const* label, LayerShape shape, Scheme scheme, int tokens, Pattern pattern, std::uint64_t seed,
               Tuning const* tuning = nullptr) {
  Problem problem(shape, scheme, tokens, pattern, seed);
  ContiguousLayer layer(shape, scheme, problem.layer_weights());
  DeviceArray<char> workspace(static_cast<std::size_t>(layer.workspace_bytes(tokens)));
  DeviceArray<char> out(static_cast<std::size_t>(tokens) * shape.hidden * 2);
  double worst = 0;
  double norm = 0;
  Tuning const t = tuning != nullptr ? *tuning : choose_tuning(shape, scheme, tokens);
  std::vector<char> first;
  bool same = true;
  for (int repeat = 0; repeat < 3; ++repeat) {
    workspace.fill_bytes(0xFF);
    out.fill_bytes(0xFF);
    layer.forward(problem.call(out.data()), t, workspace.data(), nullptr);
    check_cuda(cudaDeviceSynchronize(), label);
    if (repeat == 0) {
      Difference const d = compare(problem, out.data(), 128);
      worst = d.relative;
      norm = d.norm;
      first = out.download();
    } else {
      same = same && first == out.download();
    }
  }
  // Of few values, one e4m3 code that rounds the other way is a large part.
  bool const ok = worst < (is_fp8(scheme) ? (tokens < 8 ? 4e-2 : 1e-2) : 5e-3) && same;
  if (!ok) ++failures;
  std::printf("%s %-10s E%d H%d I%d k%d M%-6d pattern %d tile %3d: rel %.3e norm %.3e%s\n", ok ? "ok  " : "FAIL", name(scheme),
              shape.num_experts, shape.hidden, shape.intermediate, shape.topk, tokens, static_cast<int>(pattern), t.tile_rows, worst, norm,
              same ? "" : " NOT REPEATABLE");
  std::fflush(stdout);
}

void check_all(Scheme scheme, std::uint64_t seed) {
  LayerShape const tiny{8, 256, is_fp8(scheme) ? 256 : 192, 2};
  LayerShape const odd{16, is_fp8(scheme) ? 384 : 320, is_fp8(scheme) ? 128 : 320, 4};
  for (int tokens : {1, 2, 7, 8, 9, 33, 64, 129, 222, 1024}) check_one("tiny", tiny, scheme, tokens, Pattern::random, ++seed);
  for (Pattern pattern : {Pattern::one_expert, Pattern::some_missing, Pattern::all_missing, Pattern::few_experts}) {
    for (int tokens : {1, 40, 700}) check_one("odd", odd, scheme, tokens, pattern, ++seed);
  }
  LayerShape const one{4, 512, 256, 1};
  for (Pattern pattern : {Pattern::random, Pattern::some_missing, Pattern::one_expert, Pattern::all_missing})
    check_one("k1", one, scheme, 300, pattern, ++seed);
  for (int rows : {8, 16, 32, 48, 64, 80, 96, 112, 128}) {
    Tuning t{};
    t.tile_rows = rows;
    check_one("tile", tiny, scheme, 500, Pattern::random, ++seed, &t);
  }
  check_one("qwen3-30b", kShapes.at("qwen3-30b-a3b"), scheme, 1, Pattern::random, ++seed);
  check_one("qwen3-30b", kShapes.at("qwen3-30b-a3b"), scheme, 64, Pattern::random, ++seed);
  check_one("qwen3-30b", kShapes.at("qwen3-30b-a3b"), scheme, 1000, Pattern::random, ++seed);
  check_one("deepseek", kShapes.at("deepseek-v3-ep8rank"), scheme, 1, Pattern::random, ++seed);
  check_one("deepseek", kShapes.at("deepseek-v3-ep8rank"), scheme, 3000, Pattern::random, ++seed);
  if (!is_fp8(scheme)) check_one("gpt-oss", kShapes.at("gpt-oss-120b"), scheme, 37, Pattern::random, ++seed);
}

constexpr double kStreamCeiling = 4472e9;
constexpr double kBf16Ceiling = 679.8e12;
constexpr double kFp8Ceiling = 1266e12;

/// Microseconds of one layer: `sets` problems in one graph, repeated until it lasts at least 1.5 ms; median of 25 replays after warming up.
void time_one(std::string const& label, LayerShape shape, Scheme scheme, int tokens, int tile_rows, int max_splits, int cluster) {
  int const sets = tokens <= 64 ? 8 : tokens <= 256 ? 4 : 2;
  bool const fp8 = is_fp8(scheme);
  std::size_t const weight_bytes = std::size_t(3) * shape.num_experts * shape.hidden * shape.intermediate * (fp8 ? 1 : 2);
  int const weight_sets = weight_bytes > (std::size_t(12) << 30) ? 1 : 2;  // one set of weights is already many times the L2
  std::vector<Problem> problems;
  problems.reserve(static_cast<std::size_t>(sets));
  double experts_hit = 0;
  std::vector<std::vector<std::int32_t>> used;
  for (int s = 0; s < sets; ++s) {
    if (s < weight_sets) {
      problems.emplace_back(shape, scheme, tokens, Pattern::random, 100 + 10 * s);
    } else {
      LayerShape small = shape;
      problems.emplace_back(small, scheme, tokens, Pattern::random, 100 + 10 * s);
      problems.back().w13 = DeviceArray<char>();
      problems.back().w2 = DeviceArray<char>();
    }
    std::vector<std::int32_t> ids = problems.back().ids.download();
    if (tokens == 1) {  // disjoint experts, so that weights come from memory
      for (int j = 0; j < shape.topk; ++j) ids[static_cast<std::size_t>(j)] = (s * shape.topk + j) * 5 % shape.num_experts;
      problems.back().ids.upload(ids);
    }
    std::vector<char> seen(static_cast<std::size_t>(shape.num_experts), 0);
    for (std::int32_t id : ids) seen[static_cast<std::size_t>(id)] = 1;
    for (char c : seen) experts_hit += c;
  }
  experts_hit /= sets;
  std::vector<ContiguousLayer> layers;
  for (int s = 0; s < sets; ++s) {
    Problem const& owner = problems[static_cast<std::size_t>(s % weight_sets)];
    layers.emplace_back(shape, scheme, owner.layer_weights());
  }
  DeviceArray<char> workspace(static_cast<std::size_t>(layers[0].workspace_bytes(tokens)));
  DeviceArray<char> out(static_cast<std::size_t>(tokens) * shape.hidden * 2);
  Tuning tuning = choose_tuning(shape, scheme, tokens);
  if (tile_rows > 0) {
    tuning.tile_rows = tile_rows;
    if (max_splits > 0) tuning.max_splits = max_splits;
    if (cluster > 0) tuning.cluster = cluster;
  }
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate");
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check_cuda(cudaEventCreate(&begin), "cudaEventCreate");
  check_cuda(cudaEventCreate(&end), "cudaEventCreate");
  auto const round = [&] {
    for (int s = 0; s < sets; ++s) {
      LayerCall const call = problems[static_cast<std::size_t>(s)].call(out.data());
      layers[static_cast<std::size_t>(s)].forward(call, tuning, workspace.data(), stream);
    }
  };
  round();
  check_cuda(cudaStreamSynchronize(stream), "first round");
  check_cuda(cudaEventRecord(begin, stream), "event");
  round();
  check_cuda(cudaEventRecord(end, stream), "event");
  check_cuda(cudaStreamSynchronize(stream), "second round");
  float ms = 0;
  check_cuda(cudaEventElapsedTime(&ms, begin, end), "event");
  int const repeats = std::max(1, std::min(200, static_cast<int>(1.5F / std::max(ms, 0.01F)) + 1));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int r = 0; r < repeats; ++r) round();
  check_cuda(cudaStreamEndCapture(stream, &graph), "capture");
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  float warm = 0;
  float const warm_target = tokens >= 1024 ? 250.0F : 60.0F;
  std::vector<float> times;
  while (warm < warm_target || times.size() < 25) {
    check_cuda(cudaEventRecord(begin, stream), "event");
    check_cuda(cudaGraphLaunch(exec, stream), "launch");
    check_cuda(cudaEventRecord(end, stream), "event");
    check_cuda(cudaStreamSynchronize(stream), "replay");
    check_cuda(cudaEventElapsedTime(&ms, begin, end), "event");
    if (warm < warm_target) {
      warm += ms;
    } else {
      times.push_back(ms * 1000.0F / static_cast<float>(repeats * sets));
    }
  }
  std::sort(times.begin(), times.end());
  double const us = times[times.size() / 2];
  double const flops = 6.0 * tokens * shape.topk * shape.hidden * shape.intermediate;
  double const bytes = experts_hit * 3.0 * shape.hidden * shape.intermediate * (fp8 ? 1 : 2) + 4.0 * tokens * shape.hidden;
  double const floor_us = 1e6 * std::max(flops / (fp8 ? kFp8Ceiling : kBf16Ceiling), bytes / kStreamCeiling);
  std::printf("%-20s %-9s M%-6d %9.1f us (min %.1f max %.1f) %7.1f TFLOP/s %7.0f GB/s floor %8.1f ratio %.3f tile %d\n", label.c_str(),
              name(scheme), tokens, us, times.front(), times.back(), flops / us * 1e-6, bytes / us * 1e-3, floor_us, us / floor_us,
              tuning.tile_rows);
  std::fflush(stdout);
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
}

}  // namespace

int main(int argc, char** argv) try {
  std::string const mode = argc > 1 ? argv[1] : "";
  Scheme const scheme = argc > 2 && std::string(argv[2]) == "fp8_block" ? Scheme::fp8_block
                        : argc > 2 && std::string(argv[2]) == "f16"     ? Scheme::f16
                                                                        : Scheme::bf16;
  if (mode == "check") {
    check_all(scheme, argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 1);
    std::printf("%d failures\n", failures);
    return failures == 0 ? 0 : 1;
  }
  if (mode == "time" && argc > 4) {
    for (auto const& [label, shape] : kShapes) {
      if (std::string(argv[3]) != "all" && label.find(argv[3]) == std::string::npos) continue;
      if (is_fp8(scheme) && shape.hidden % 128 != 0) continue;
      std::string list = argv[4];
      for (std::size_t at = 0; at < list.size();) {
        std::size_t const comma = std::min(list.find(',', at), list.size());
        time_one(label, shape, scheme, std::atoi(list.substr(at, comma - at).c_str()), argc > 5 ? std::atoi(argv[5]) : 0,
                 argc > 6 ? std::atoi(argv[6]) : 0, argc > 7 ? std::atoi(argv[7]) : 0);
        at = comma + 1;
      }
    }
    return 0;
  }
  std::fprintf(stderr, "usage: hopper_layer_bench check|time …\n");
  return 2;
} catch (std::exception const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
