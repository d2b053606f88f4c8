// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_composition.cuh: a whole layer in the CUDA space over any experts, on random weights and inputs, for tests that compare
// two experts policies.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/comm/self.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/routing/softmax_topk.hpp"
#include "tests/gpu/on_hopper.hpp"
#include "tests/gpu/relative_error.hpp"

namespace moe_test {

using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;

template <class T, class ActivationPolicy = moe::activation::Any, int Hidden = moe::dynamic, bool BatchInvariant = false>
struct CompositionConfig : moe::LayerDefaults {
  static constexpr int hidden = Hidden;
  using Act = T;
  using Weight = T;
  using Activation = ActivationPolicy;
  static constexpr bool batch_invariant = BatchInvariant;
};

/// The types that a typed test of compositions varies.
template <class T, class Q>
struct Types {
  using Act = T;
  using Quant = Q;
};
/// The largest allowed difference between a composition's output and CudaReference's. 16-bit products: the rounding of the intermediate and
/// of the slots; in int8 of the slots, since the intermediate is quantised unrounded here and there. fp8: the oracle quantises the
/// unrounded intermediate, so a value may change by one code, more often where the kernel first rounds the row to bf16 (scales of whole
/// rows).
template <class Quant>
constexpr double composition_tolerance() {
  if (!Quant::kQuantizesActivations || Quant::kPayloadDType == moe::DType::i8) return 5e-3;
  return std::is_same_v<Quant, moe::quantization::Fp8Block<>> ? 1e-2 : 1.5e-2;
}

/// One layer with random weights, and its options.
struct LayerCase {
  int hidden = 256;
  int intermediate = 256;
  int experts = 16;
  int topk = 4;
  moe::activation::Kind activation = moe::activation::Kind::silu;
  moe::activation::Constants constants{};
  bool bias = false;
  bool weight_on_input = false;
  unsigned seed = 1;
};

template <class T, class Quant, class Backend, class Experts, class ActivationPolicy = moe::activation::Any, int Hidden = moe::dynamic,
          bool BatchInvariant = false>
class CompositionUnderTest {
 public:
  using Space = moe::space::cuda;
  using Config = CompositionConfig<T, ActivationPolicy, Hidden, BatchInvariant>;
  using Layer = moe::ModularKernel<Config, Router, Quant, Backend, Experts>;

  CompositionUnderTest(LayerCase const& c, std::int64_t max_tokens, Quant const& quant = {})
      : case_(c),
        max_tokens_(max_tokens),
        store_(c.experts, c.hidden, c.intermediate, moe::activation::gated(c.activation), quant),
        hidden_(max_tokens * c.hidden),
        logits_(max_tokens * c.experts),
        output_(max_tokens * c.hidden) {
    fill_weights();
    typename Layer::Params p{.shape = {c.hidden, c.intermediate, c.experts, c.topk, c.weight_on_input},
                             .max_tokens_per_rank = max_tokens,
                             .placement = moe::ExpertPlacement(c.experts, 1),
                             .router = typename Router::Params{c.experts, c.topk},
                             .quantization = quant};
    if constexpr (requires { p.activation.kind; }) p.activation.kind = c.activation;
    p.activation.constants = c.constants;
    layer_ = std::make_unique<Layer>(comm_, store_.view(), p);
  }

  /// Draws rows and logits from `seed`; every eighth logit is -inf, so that some slots stay empty.
  void fill(unsigned seed) {
    std::mt19937 gen(seed);
    std::normal_distribution<float> normal;
    std::vector<T> x(static_cast<std::size_t>(max_tokens_ * case_.hidden));
    std::vector<float> z(static_cast<std::size_t>(max_tokens_ * case_.experts));
    for (T& v : x) v = moe::from_float<T>(normal(gen));
    for (float& v : z) v = gen() % 8 == 0 ? -std::numeric_limits<float>::infinity() : normal(gen);
    std::vector<T> const nan(x.size(), moe::from_float<T>(std::numeric_limits<float>::quiet_NaN()));
    hidden_.copy_from_host(x.data());
    logits_.copy_from_host(z.data());
    output_.copy_from_host(nan.data());
  }
  /// NaN in the rows and logits from `first` on.
  void poison_input(std::int64_t first) {
    auto const poison = [&](auto& buffer, int width) {
      std::size_t const bytes = static_cast<std::size_t>((max_tokens_ - first) * width) * sizeof(*buffer.data());
      if (bytes > 0) moe::check_cuda(cudaMemset(buffer.data() + first * width, 0xFF, bytes), "cudaMemset");
    };
    poison(hidden_, case_.hidden);
    poison(logits_, case_.experts);
  }
  void launch(std::int64_t rows, cudaStream_t stream, moe::ForwardOptions const& options = {}) {
    layer_->forward(moe::make_rows<Hidden>(static_cast<T const*>(hidden_.data()), rows, case_.hidden),
                    moe::make_rows(static_cast<float const*>(logits_.data()), rows, case_.experts),
                    moe::make_rows<Hidden>(output_.data(), rows, case_.hidden), options, moe::Stream<Space>{stream});
  }
  /// forward() of rows that lie further apart than they are wide.
  std::vector<float> forward_apart(std::int64_t rows, unsigned seed) {
    fill(seed);
    std::int64_t const stride = case_.hidden + 64;
    moe::Buffer<T, Space> apart(rows * stride);
    std::size_t const width = static_cast<std::size_t>(case_.hidden) * sizeof(T);
    moe::check_cuda(cudaMemcpy2D(apart.data(), static_cast<std::size_t>(stride) * sizeof(T), hidden_.data(), width, width,
                                 static_cast<std::size_t>(rows), cudaMemcpyDeviceToDevice),
                    "cudaMemcpy2D");
    layer_->forward(moe::make_strided_rows<Hidden>(static_cast<T const*>(apart.data()), rows, case_.hidden, stride),
                    moe::make_rows(static_cast<float const*>(logits_.data()), rows, case_.experts),
                    moe::make_rows<Hidden>(output_.data(), rows, case_.hidden), {}, moe::Stream<Space>{nullptr});
    auto out = output();
    out.resize(static_cast<std::size_t>(rows * case_.hidden));
    return out;
  }
  /// Nodes of a captured forward(). Call it after a forward of as many rows: modules must have been loaded.
  std::size_t launches(std::int64_t rows) {
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    std::size_t nodes = 0;
    moe::check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate");
    launch(rows, stream);
    moe::check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    moe::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    launch(rows, stream);
    moe::check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
    moe::check_cuda(cudaGraphGetNodes(graph, nullptr, &nodes), "cudaGraphGetNodes");
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
    return nodes;
  }
  /// Writes the output over the input; output() gives it.
  void launch_in_place(std::int64_t rows, cudaStream_t stream) {
    layer_->forward(moe::make_rows<Hidden>(static_cast<T const*>(hidden_.data()), rows, case_.hidden),
                    moe::make_rows(static_cast<float const*>(logits_.data()), rows, case_.experts),
                    moe::make_rows<Hidden>(hidden_.data(), rows, case_.hidden), {}, moe::Stream<Space>{stream});
    moe::check_cuda(cudaMemcpyAsync(output_.data(), hidden_.data(), hidden_.bytes(), cudaMemcpyDeviceToDevice, stream), "cudaMemcpyAsync");
  }
  /// The output of the last launch, [max_tokens, H].
  std::vector<float> output() {
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::vector<T> y(static_cast<std::size_t>(max_tokens_ * case_.hidden));
    output_.copy_to_host(y.data());
    std::vector<float> out;
    for (T v : y) out.push_back(moe::to_float(v));
    return out;
  }
  std::vector<float> forward(std::int64_t rows, unsigned seed) {
    fill(seed);
    launch(rows, nullptr);
    auto out = output();
    out.resize(static_cast<std::size_t>(rows * case_.hidden));
    return out;
  }
  Layer& layer() { return *layer_; }

 private:
  void fill_weights() {
    std::mt19937 gen(case_.seed);
    std::normal_distribution<float> normal;
    int const rows13 = (moe::activation::gated(case_.activation) ? 2 : 1) * case_.intermediate;
    std::vector<float> w13(static_cast<std::size_t>(rows13 * case_.hidden)),
        w2(static_cast<std::size_t>(case_.hidden * case_.intermediate));
    std::vector<float> b13(static_cast<std::size_t>(rows13)), b2(static_cast<std::size_t>(case_.hidden));
    for (int e = 0; e < case_.experts; ++e) {
      for (float& v : w13) v = normal(gen) / std::sqrt(static_cast<float>(case_.hidden));
      for (float& v : w2) v = normal(gen) / std::sqrt(static_cast<float>(case_.intermediate));
      for (float& v : b13) v = 0.3F * normal(gen);
      for (float& v : b2) v = 0.3F * normal(gen);
      store_.set_expert(e, w13.data(), w2.data());
      if (case_.bias) store_.set_bias(e, b13.data(), b2.data());
    }
  }

  LayerCase case_;
  std::int64_t max_tokens_;
  moe::comm::Self<Space> comm_;
  moe::experts::WeightStore<Config, Quant, Space> store_;
  moe::Buffer<T, Space> hidden_;
  moe::Buffer<float, Space> logits_;
  moe::Buffer<T, Space> output_;
  std::unique_ptr<Layer> layer_;
};

/// A captured forward of `rows` rows, replayed after new inputs, gives the bits of `direct`, the same composition called without a graph.
template <class Composition>
void expect_replays(Composition& captured, Composition& direct, std::int64_t rows) {
  moe::CudaStream stream;
  captured.fill(1);
  moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the stream does not wait for the default stream
  captured.launch(rows, stream);                                      // outside the capture first: modules load here
  stream.synchronize();
  moe::CudaGraph const graph(stream, [&] { captured.launch(rows, stream); });
  for (unsigned seed : {5U, 6U, 7U}) {
    captured.fill(seed);
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    graph.launch(stream);
    stream.synchronize();
    EXPECT_TRUE(captured.output() == direct.forward(rows, seed)) << "seed " << seed;
  }
}

}  // namespace moe_test
