// SPDX-License-Identifier: Apache-2.0
// bench/host_layer_bench.cpp: the host layer (route, experts, sum) over tokens, experts and weight types. 64 rows are checked against the
// oracle before it is timed. MOE_BENCH_SHAPE="H I E k" times one shape instead (bench/compare_host.py does).
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>
#include <sstream>
#include <stdexcept>
#include <vector>

#include "bench/checked.hpp"
#include "moe/activation/activation.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/experts/reference.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/none.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "moe/routing/softmax_topk.hpp"

namespace {

using namespace moe;

template <class T>
struct Config : LayerDefaults {
  using Act = T;
  using Weight = T;
  using Activation = activation::Silu;
};
using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;

struct Shape4 {
  std::int64_t hidden = 1024;
  std::int64_t intermediate = 512;
  int experts = 32;
  int topk = 4;
};

Shape4 shape_of(std::int64_t experts) {
  Shape4 s;
  if (char const* given = std::getenv("MOE_BENCH_SHAPE")) {
    std::istringstream in(given);
    if (!(in >> s.hidden >> s.intermediate >> s.experts >> s.topk)) {
      throw std::runtime_error("MOE_BENCH_SHAPE must be \"H I E k\"");
    }
  } else {
    s.experts = static_cast<int>(experts);
  }
  return s;
}

template <class T, class Quant>
struct Problem {
  Shape4 shape;
  experts::WeightStore<Config<T>, Quant> weights;
  std::vector<T> hidden;
  std::vector<float> logits;
  std::vector<T> output;

  Problem(Shape4 s, std::int64_t tokens)
      : shape(s),
        weights(s.experts, s.hidden, s.intermediate, true),
        hidden(static_cast<std::size_t>(tokens * s.hidden)),
        logits(static_cast<std::size_t>(tokens * s.experts)),
        output(hidden.size()) {
    std::mt19937 gen(1);
    std::normal_distribution<float> dist;
    std::vector<float> w13(static_cast<std::size_t>(2 * s.intermediate * s.hidden));
    std::vector<float> w2(static_cast<std::size_t>(s.hidden * s.intermediate));
    for (int e = 0; e < s.experts; ++e) {
      for (float& v : w13) {
        v = dist(gen) / std::sqrt(static_cast<float>(s.hidden));
      }
      for (float& v : w2) {
        v = dist(gen) / std::sqrt(static_cast<float>(s.intermediate));
      }
      weights.set_expert(e, w13.data(), w2.data());
    }
    for (T& v : hidden) {
      v = from_float<T>(dist(gen));
    }
    for (float& v : logits) {
      v = dist(gen);
    }
  }
  std::int64_t tokens() const { return static_cast<std::int64_t>(hidden.size()) / shape.hidden; }

  template <class Experts>
  using Layer = ModularKernel<Config<T>, Router, Quant, backends::NoExpertParallel<>, Experts>;
  template <class Experts>
  typename Layer<Experts>::Params params() const {
    return {.shape = {shape.hidden, shape.intermediate, shape.experts, shape.topk, false},
            .max_tokens_per_rank = tokens(),
            .placement = ExpertPlacement(shape.experts, 1),
            .router = {shape.experts, shape.topk}};
  }
  template <class L>
  void forward(L& layer) {
    forward(layer, hidden, logits, output);
  }
  template <class L>
  void forward(L& layer, std::vector<T> const& x, std::vector<float> const& scores, std::vector<T>& y) const {
    auto const rows = static_cast<std::int64_t>(x.size()) / shape.hidden;
    layer.forward(make_rows(x.data(), rows, shape.hidden), make_rows(scores.data(), rows, shape.experts),
                  make_rows(y.data(), rows, shape.hidden));
  }
};

/// The relative error of problem.output against the oracle in float64, over at most 64 rows spread over the batch: the oracle is slow.
template <class T, class Quant>
double sampled_error(Problem<T, Quant>& problem) {
  std::int64_t const rows = std::min<std::int64_t>(problem.tokens(), 64);
  auto const sample = [&](auto const& from, std::int64_t width) {
    std::remove_cvref_t<decltype(from)> to(static_cast<std::size_t>(rows * width));
    for (std::int64_t i = 0; i < rows; ++i) {
      std::copy_n(from.begin() + (i * problem.tokens() / rows) * width, width, to.begin() + i * width);
    }
    return to;
  };
  std::vector<T> const hidden = sample(problem.hidden, problem.shape.hidden);
  std::vector<float> const logits = sample(problem.logits, problem.shape.experts);
  std::vector<T> const fast = sample(problem.output, problem.shape.hidden);
  std::vector<T> exact(fast.size());
  comm::Self<> self;
  typename Problem<T, Quant>::template Layer<experts::Reference<double>> oracle(self, problem.weights.view(),
                                                                                problem.template params<experts::Reference<double>>());
  problem.forward(oracle, hidden, logits, exact);
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < fast.size(); ++i) {
    double const want = to_float(exact[i]);
    error += (to_float(fast[i]) - want) * (to_float(fast[i]) - want);
    norm += want * want;
  }
  return std::sqrt(error / norm);
}

template <class T, class Quant = quantization::None>
void host_layer(benchmark::State& state) {
  Problem<T, Quant> problem(shape_of(state.range(1)), state.range(0));
  comm::Self<> self;
  typename Problem<T, Quant>::template Layer<experts::OneDnn> layer(self, problem.weights.view(),
                                                                    problem.template params<experts::OneDnn>());
  problem.forward(layer);
  double const error = sampled_error(problem);
  if (!(error < (std::is_same_v<T, float> ? 1e-5 : 5e-3))) {
    moe_bench::skip_wrong(state, text("the error against float64 is ", error));
    return;
  }
  for (auto _ : state) {
    problem.forward(layer);
  }
  double const flops = 6.0 * static_cast<double>(problem.tokens()) * problem.shape.topk * static_cast<double>(problem.shape.hidden) *
                       static_cast<double>(problem.shape.intermediate);
  state.counters["GFLOP/s"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
  state.counters["tokens"] = static_cast<double>(problem.tokens());
}

void arguments(benchmark::internal::Benchmark* b) {
  std::vector<std::int64_t> const experts =
      std::getenv("MOE_BENCH_SHAPE") != nullptr ? std::vector<std::int64_t>{0} : std::vector<std::int64_t>{8, 32};
  for (std::int64_t e : experts) {
    for (std::int64_t tokens : {1, 16, 128, 1024}) {
      b->Args({tokens, e});
    }
  }
  b->ArgNames({"tokens", "experts"})->UseRealTime()->Unit(benchmark::kMillisecond);
}

BENCHMARK(host_layer<float>)->Apply(arguments);
BENCHMARK(host_layer<bf16>)->Apply(arguments);
BENCHMARK(host_layer<bf16, quantization::Mxfp4W4A16<>>)->Apply(arguments);
BENCHMARK(host_layer<bf16, quantization::Nvfp4W4A16>)->Apply(arguments);
BENCHMARK(host_layer<bf16, quantization::Int4Group128>)->Apply(arguments);

}  // namespace

int main(int argc, char** argv) {
  if (!moe_bench::initialize(argc, argv)) return moe_bench::kBadArguments;
  return moe_bench::run_benchmarks();
}
