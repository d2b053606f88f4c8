// SPDX-License-Identifier: Apache-2.0
// bench/hopper_w4a16_bench.cu: times whole layers with 4-bit weights: CUDA graphs, rotated inputs, weights larger than L2.
//
//   hopper_w4a16_bench <int4|int4_zero|mxfp4> <shape|all> <tokens,tokens,…> [tile_rows]
//
// The floor is the larger of the useful operations over the sustained bf16 rate and the least bytes (packed weights of the experts hit,
// once, plus input and output) over the stream rate; both rates are those of docs/results.md.
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "moe/experts/hopper_w4a16.hpp"
#include "tests/gpu/hopper_reference.cuh"

namespace {

using namespace moe::hopper;
using namespace moe_test;

std::map<std::string, LayerShape> const kShapes{{"gpt-oss-20b", {32, 2880, 2880, 4}},
                                                {"gpt-oss-120b", {128, 2880, 2880, 4}},
                                                {"kimi-k2", {384, 7168, 2048, 8}},
                                                {"qwen3-30b-a3b", {128, 2048, 768, 8}}};

constexpr double kStreamCeiling = 4472e9;
constexpr double kBf16Ceiling = 679.8e12;

__global__ void fill_bytes(std::uint8_t* data, long long count, std::uint64_t seed, std::uint8_t low, unsigned range) {
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<long long>(gridDim.x) * blockDim.x) {
    data[i] = static_cast<std::uint8_t>(low + mix(seed + static_cast<std::uint64_t>(i)) % range);
  }
}
__global__ void fill_pairs(float2* data, long long count, std::uint64_t seed, float sigma) {
  for (long long i = blockIdx.x * static_cast<long long>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<long long>(gridDim.x) * blockDim.x) {
    std::uint64_t const r = mix(seed + static_cast<std::uint64_t>(i));
    data[i] = make_float2(sigma * (0.5F + static_cast<float>(r & 1023) / 1024.0F), static_cast<float>((r >> 20) % 16));
  }
}

/// A layer with random weights and biases; the unpacked codes are freed.
struct Layer {
  DeviceArray<char> packed;
  DeviceArray<float> b13, b2;
  std::unique_ptr<W4A16Layer> layer;

  Layer(LayerShape const& s, W4Scheme scheme, std::uint64_t seed) {
    auto const codes = [&](long long rows, long long cols) {
      DeviceArray<std::uint8_t> c(static_cast<std::size_t>(s.num_experts * rows * cols / 2));
      fill_bytes<<<2048, 256>>>(c.data(), static_cast<long long>(c.size()), ++seed, 0, 256);
      return c;
    };
    auto const scales = [&](long long rows, long long cols, int group) {
      long long const count = s.num_experts * rows * (cols / group);
      DeviceArray<std::uint8_t> v(static_cast<std::size_t>(count) * (scheme == W4Scheme::mxfp4 ? 1 : scheme == W4Scheme::int4 ? 4 : 8));
      float const sigma = 0.2F / std::sqrt(static_cast<float>(cols));
      if (scheme == W4Scheme::mxfp4) {
        fill_bytes<<<1024, 256>>>(v.data(), count, ++seed, static_cast<std::uint8_t>(125 + std::ilogb(sigma)), 3);
      } else if (scheme == W4Scheme::int4) {
        fill_positive<<<1024, 256>>>(reinterpret_cast<float*>(v.data()), count, ++seed, 0.5F * sigma, 1.5F * sigma);
      } else {
        fill_pairs<<<1024, 256>>>(reinterpret_cast<float2*>(v.data()), count, ++seed, sigma);
      }
      return v;
    };
    auto const group = [&](int cols) { return scheme == W4Scheme::mxfp4 ? 32 : cols % 128 == 0 ? 128 : 64; };
    W4Weights w{};
    w.w13_group = group(s.hidden);
    w.w2_group = group(s.intermediate);
    auto const c13 = codes(2LL * s.intermediate, s.hidden);
    auto const c2 = codes(s.hidden, s.intermediate);
    auto const s13 = scales(2LL * s.intermediate, s.hidden, w.w13_group);
    auto const s2 = scales(s.hidden, s.intermediate, w.w2_group);
    b13 = DeviceArray<float>(static_cast<std::size_t>(2) * s.num_experts * s.intermediate);
    b2 = DeviceArray<float>(static_cast<std::size_t>(s.num_experts) * s.hidden);
    fill_normal<<<256, 256>>>(b13.data(), static_cast<long long>(b13.size()), ++seed, 1.0F);
    fill_normal<<<256, 256>>>(b2.data(), static_cast<long long>(b2.size()), ++seed, 1.0F);
    w.w13 = c13.data();
    w.w2 = c2.data();
    w.w13_scales = s13.data();
    w.w2_scales = s2.data();
    w.b13 = b13.data();
    w.b2 = b2.data();
    packed = DeviceArray<char>(static_cast<std::size_t>(W4A16Layer::packed_bytes(s, scheme)));
    W4Launcher const launcher = scheme == W4Scheme::mxfp4  ? w4_launcher<W4Scheme::mxfp4>()
                                : scheme == W4Scheme::int4 ? w4_launcher<W4Scheme::int4>()
                                                           : w4_launcher<W4Scheme::int4_zero>();
    layer = std::make_unique<W4A16Layer>(s, scheme, w, W4Activation{1.702F, 1.0F, 7.0F}, packed.data(), launcher);
    check_cuda(cudaDeviceSynchronize(), "packing");
  }
};

/// One batch of random rows.
struct Batch {
  DeviceArray<__nv_bfloat16> x;
  DeviceArray<float> weights;
  DeviceArray<std::int32_t> ids;
  int hit = 0;

  Batch(LayerShape const& s, int tokens, int set)
      : x(std::size_t(tokens) * s.hidden), weights(std::size_t(tokens) * s.topk), ids(weights.size()) {
    fill_normal<<<1024, 256>>>(x.data(), static_cast<long long>(x.size()), 900 + static_cast<unsigned>(set), 1.0F);
    fill_positive<<<256, 256>>>(weights.data(), static_cast<long long>(weights.size()), 800 + static_cast<unsigned>(set), 0.05F, 1.0F);
    std::vector<std::int32_t> host = make_ids(s, tokens, Pattern::random, 700 + static_cast<unsigned>(set));
    if (tokens == 1) {  // disjoint experts, so that weights come from memory
      for (int j = 0; j < s.topk; ++j) host[static_cast<std::size_t>(j)] = (set * s.topk + j) * 5 % s.num_experts;
    }
    ids.upload(host);
    std::vector<char> seen(static_cast<std::size_t>(s.num_experts), 0);
    for (std::int32_t id : host) seen[static_cast<std::size_t>(id)] = 1;
    for (char c : seen) hit += c;
  }
};

/// Microseconds of one layer: all batches in one graph, repeated until it lasts at least 1.5 ms; median of 25 replays after warming up.
void time_one(std::string const& label, LayerShape const& s, W4Scheme scheme, Layer const& layer, int tokens, int tile_rows) {
  int const sets = tokens <= 64 ? 8 : tokens <= 256 ? 4 : 2;
  std::vector<Batch> batches;
  double hit = 0;
  for (int set = 0; set < sets; ++set) {
    batches.emplace_back(s, tokens, set);
    hit += batches.back().hit;
  }
  hit /= sets;
  DeviceArray<char> workspace(static_cast<std::size_t>(layer.layer->workspace_bytes(tokens)));
  DeviceArray<__nv_bfloat16> out(std::size_t(tokens) * s.hidden);
  W4Tuning tuning = choose_w4_tuning(s, scheme, tokens);
  if (tile_rows > 0) tuning.tile_rows = tile_rows;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate");
  check_cuda(cudaEventCreate(&begin), "cudaEventCreate");
  check_cuda(cudaEventCreate(&end), "cudaEventCreate");
  auto const round = [&] {
    for (Batch const& b : batches) {
      LayerCall call{};
      call.x = b.x.data();
      call.topk_ids = b.ids.data();
      call.topk_weights = b.weights.data();
      call.out = out.data();
      call.max_tokens = tokens;
      layer.layer->forward(call, tuning, workspace.data(), stream);
    }
  };
  float ms = 0;
  auto const timed = [&](auto const& work) {
    check_cuda(cudaEventRecord(begin, stream), "event");
    work();
    check_cuda(cudaEventRecord(end, stream), "event");
    check_cuda(cudaStreamSynchronize(stream), label.c_str());
    check_cuda(cudaEventElapsedTime(&ms, begin, end), "event");
    return ms;
  };
  timed(round);
  int const repeats = std::max(1, std::min(200, static_cast<int>(1.5F / std::max(timed(round), 0.01F)) + 1));
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  for (int r = 0; r < repeats; ++r) round();
  check_cuda(cudaStreamEndCapture(stream, &graph), "capture");
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "instantiate");
  auto const replay = [&] { check_cuda(cudaGraphLaunch(exec, stream), "launch"); };
  for (float warm = 0; warm < (tokens >= 1024 ? 250.0F : 60.0F);) warm += timed(replay);
  std::vector<float> times;
  for (int i = 0; i < 25; ++i) times.push_back(timed(replay) * 1000.0F / static_cast<float>(repeats * sets));
  std::sort(times.begin(), times.end());
  double const us = times[times.size() / 2];
  double const flops = 6.0 * tokens * s.topk * s.hidden * s.intermediate;
  double const bytes =
      hit * static_cast<double>(packed_bytes(scheme, 2LL * s.intermediate, s.hidden) + packed_bytes(scheme, s.hidden, s.intermediate)) +
      4.0 * tokens * s.hidden;
  double const floor_us = 1e6 * std::max(flops / kBf16Ceiling, bytes / kStreamCeiling);
  std::printf("%-20s %-9s M%-6d %8.1f us (min %.1f max %.1f) %6.1f TFLOP/s %5.0f GB/s floor %7.1f ratio %.2f tile %d\n", label.c_str(),
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
  if (argc < 4) {
    std::fprintf(stderr, "usage: hopper_w4a16_bench <int4|int4_zero|mxfp4> <shape|all> <tokens,tokens,...> [tile_rows]\n");
    return 2;
  }
  std::string const wanted = argv[1];
  W4Scheme const scheme = wanted == "int4" ? W4Scheme::int4 : wanted == "int4_zero" ? W4Scheme::int4_zero : W4Scheme::mxfp4;
  for (auto const& [label, shape] : kShapes) {
    if (std::string(argv[2]) != "all" && label.find(argv[2]) == std::string::npos) continue;
    Layer const layer(shape, scheme, 1);
    std::string const list = argv[3];
    for (std::size_t at = 0; at < list.size();) {
      std::size_t const comma = std::min(list.find(',', at), list.size());
      time_one(label, shape, scheme, layer, std::atoi(list.substr(at, comma - at).c_str()), argc > 4 ? std::atoi(argv[4]) : 0);
      at = comma + 1;
    }
  }
  return 0;
} catch (std::exception const& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
