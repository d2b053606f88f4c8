// SPDX-License-Identifier: Apache-2.0
// bench/layer_problem.cuh: what the layer benchmarks share: the five shapes, the floor, and rotating inputs and weights, so that no call
// finds them in L2.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "moe/core/cuda_graph.hpp"
#include "moe/core/cuda_space.hpp"
#include "tests/gpu/hopper_reference.cuh"

namespace moe_bench {

using moe::hopper::LocalShape;
using moe::hopper::Scheme;
using moe_test::Pattern;
using moe_test::Problem;
using moe_test::TypedMemory;

inline std::map<std::string, LocalShape> const kShapes{{"mixtral-8x7b", {8, 4096, 14336, 2}},
                                                       {"qwen3-30b-a3b", {128, 2048, 768, 8}},
                                                       {"qwen3-235b-a22b", {128, 4096, 1536, 8}},
                                                       {"deepseek-v3-ep8rank", {32, 7168, 2048, 1}},
                                                       {"gpt-oss-120b", {128, 2880, 2880, 4}}};

// Ceilings of one H200: a read-only stream of 4 GiB, cuBLAS bf16 and fp8 8192³ on random data, sustained. int8: fp8's, nominally the same.
inline constexpr double kStreamCeiling = 4472e9;
inline constexpr double kBf16Ceiling = 679.8e12;
inline constexpr double kFp8Ceiling = 1266e12;

/// Useful operations and least bytes of one call: 6 M k H I; the weights of the experts that are hit, once, and input and output in bf16.
struct LayerWork {
  double flops = 0;
  double bytes = 0;
  double ceiling = kBf16Ceiling;
  LayerWork() = default;
  LayerWork(LocalShape const& s, Scheme scheme, int tokens, double experts_hit)
      : flops(6.0 * tokens * s.topk * s.hidden * s.intermediate),
        bytes(experts_hit * 3.0 * s.hidden * s.intermediate * moe::hopper::element_bytes(scheme) + 4.0 * tokens * s.hidden),
        ceiling(moe::hopper::is_scaled(scheme) ? kFp8Ceiling : kBf16Ceiling) {}
  double floor_us() const { return 1e6 * std::max(flops / ceiling, bytes / kStreamCeiling); }
};

/// Rotating input sets: several batches over one or two sets of weights, each many times larger than L2.
struct Rotation {
  LocalShape shape;
  Scheme scheme;
  int tokens;
  int sets;
  int weight_sets;
  std::vector<Problem> problems;
  LayerWork work;

  Rotation(LocalShape shape_, Scheme scheme_, int tokens_, moe_test::Features const& features = {})
      : shape(shape_),
        scheme(scheme_),
        tokens(tokens_),
        sets(tokens_ <= 64    ? 8
             : tokens_ <= 256 ? 4
                              : 2) {
    std::size_t const weight_bytes =
        std::size_t(3) * shape.num_experts * shape.hidden * shape.intermediate * moe::hopper::element_bytes(scheme);
    weight_sets = weight_bytes > (std::size_t(12) << 30) ? 1 : 2;
    problems.reserve(static_cast<std::size_t>(sets));
    double experts_hit = 0;
    for (int s = 0; s < sets; ++s) {
      problems.emplace_back(shape, scheme, tokens, Pattern::random, 100 + 10 * static_cast<std::uint64_t>(s), features);
      Problem& problem = problems.back();
      if (s >= weight_sets) {
        problem.w13 = TypedMemory<char>();
        problem.w2 = TypedMemory<char>();
      }
      std::vector<std::int32_t> ids = problem.ids.download();
      if (tokens == 1) {  // disjoint experts, so that weights come from memory
        for (int j = 0; j < shape.topk; ++j) ids[static_cast<std::size_t>(j)] = (s * shape.topk + j) * 5 % shape.num_experts;
        problem.ids.upload(ids);
      }
      std::vector<char> seen(static_cast<std::size_t>(shape.num_experts), 0);
      for (std::int32_t id : ids) seen[static_cast<std::size_t>(id)] = 1;
      for (char c : seen) experts_hit += c;
    }
    work = LayerWork(shape, scheme, tokens, experts_hit / sets);
  }
  Problem const& batch(int s) const { return problems[static_cast<std::size_t>(s)]; }
  Problem const& weights_of(int s) const { return problems[static_cast<std::size_t>(s % weight_sets)]; }
};

/// A CUDA graph of some calls, replayed between two events.
class Replay {
 public:
  /// Captures `rounds` times enqueue(stream), which makes `calls` calls.
  template <class Enqueue>
  Replay(int rounds, int calls, Enqueue const& enqueue) : calls_(rounds * calls) {
    moe::check_cuda(cudaDeviceSynchronize(), "inputs");  // the stream does not wait for the default stream
    graph_ = moe::CudaGraph(stream_, [&] {
      for (int r = 0; r < rounds; ++r) enqueue(static_cast<cudaStream_t>(stream_));
    });
  }
  /// Microseconds per call of one replay.
  double us() {
    begin_.record(stream_);
    graph_.launch(stream_);
    end_.record(stream_);
    return 1000.0 * static_cast<double>(end_.since(begin_)) / calls_;
  }
  int calls() const { return calls_; }
  /// Replays for at least this many milliseconds.
  void warm_up(double ms) {
    for (double spent = 0; spent < ms;) spent += us() * calls_ * 1e-3;
  }

 private:
  int calls_;
  moe::CudaStream stream_;
  moe::CudaGraph graph_;
  moe::CudaEvent begin_, end_;
};

/// Rounds that make a replay last 1.5 ms.
template <class Enqueue>
int rounds_of(int calls, Enqueue const& enqueue) {
  enqueue(cudaStream_t{});  // modules load here
  moe::check_cuda(cudaDeviceSynchronize(), "first round");
  double const us = Replay(1, calls, enqueue).us() * calls;
  return std::max(1, std::min(200, static_cast<int>(1500.0 / std::max(us, 10.0)) + 1));
}

}  // namespace moe_bench
