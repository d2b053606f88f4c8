// SPDX-License-Identifier: Apache-2.0
// tests/gpu/cuda_layer_test.cu: a whole layer in the CUDA space equals the same composition in the host space: the same headers, the same
// types but for the space. Random routing with masked experts, both formats of rows, poisoned outputs, zero rows, a captured graph.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/backends/collective/no_expert_parallel.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/reference.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"

namespace {

using namespace moe;
using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;

template <class T>
struct Config : LayerDefaults {
  using Act = T;
  using Weight = T;
  using Activation = activation::Silu;
};

constexpr int kHidden = 256;
constexpr int kIntermediate = 128;
constexpr int kExperts = 16;
constexpr int kTopK = 4;
constexpr std::int64_t kMaxTokens = 64;

template <class T, class Quant, class Space, class Experts>
class Problem {
 public:
  using Layer = ModularKernel<Config<T>, Router, Quant, backends::NoExpertParallel<Space>, Experts>;

  Problem() : store_(kExperts, kHidden, kIntermediate, true), layer_(comm_, filled(), params()) {}

  /// Routes and computes `rows` rows drawn from `seed`; host vectors in and out.
  std::vector<float> forward(std::int64_t rows, unsigned seed) {
    fill(rows, seed);
    std::vector<T> y(static_cast<std::size_t>(kMaxTokens * kHidden), from_float<T>(std::numeric_limits<float>::quiet_NaN()));
    if (rows > 0) {
      output_.copy_from_host(y.data());
    }
    launch(rows, Stream<Space>{});
    output_.copy_to_host(y.data());
    std::vector<float> out;
    for (std::int64_t i = 0; i < rows * kHidden; ++i) {
      out.push_back(to_float(y[static_cast<std::size_t>(i)]));
    }
    return out;
  }
  void fill(std::int64_t rows, unsigned seed) {
    std::mt19937 gen(seed);
    std::normal_distribution<float> normal;
    std::vector<T> x(static_cast<std::size_t>(kMaxTokens * kHidden));
    std::vector<float> z(static_cast<std::size_t>(kMaxTokens * kExperts));
    for (std::int64_t i = 0; i < rows * kHidden; ++i) {
      x[static_cast<std::size_t>(i)] = from_float<T>(normal(gen));
    }
    for (std::int64_t i = 0; i < rows * kExperts; ++i) {
      z[static_cast<std::size_t>(i)] = gen() % 8 == 0 ? -std::numeric_limits<float>::infinity() : normal(gen);
    }
    hidden_.copy_from_host(x.data());
    logits_.copy_from_host(z.data());
  }
  void launch(std::int64_t rows, Stream<Space> stream) {
    layer_.forward(make_rows(static_cast<T const*>(hidden_.data()), rows, kHidden),
                   make_rows(static_cast<float const*>(logits_.data()), rows, kExperts), make_rows(output_.data(), rows, kHidden), {},
                   stream);
  }
  Layer& layer() { return layer_; }
  Buffer<T, Space>& output() { return output_; }
  Buffer<float, Space>& logits() { return logits_; }

 private:
  WeightsOf<Config<T>, Quant> filled() {
    std::mt19937 gen(5);
    std::normal_distribution<float> normal;
    std::vector<float> w13(2 * kIntermediate * kHidden);
    std::vector<float> w2(kHidden * kIntermediate);
    for (int e = 0; e < kExperts; ++e) {
      for (float& v : w13) {
        v = normal(gen) / std::sqrt(static_cast<float>(kHidden));
      }
      for (float& v : w2) {
        v = normal(gen) / std::sqrt(static_cast<float>(kIntermediate));
      }
      store_.set_expert(e, w13.data(), w2.data());
    }
    return store_.view();
  }
  static typename Layer::Params params() {
    return {.shape = {kHidden, kIntermediate, kExperts, kTopK, false},
            .max_tokens_per_rank = kMaxTokens,
            .placement = ExpertPlacement(kExperts, 1),
            .router = typename Router::Params{kExperts, kTopK}};
  }
  comm::Self<Space> comm_;
  experts::WeightStore<Config<T>, Quant, Space> store_;
  Layer layer_;
  Buffer<T, Space> hidden_{kMaxTokens * kHidden};
  Buffer<float, Space> logits_{kMaxTokens * kExperts};
  Buffer<T, Space> output_{kMaxTokens * kHidden};
};

template <class T, class Quant>
void host_equals_device(double tolerance) {
  Problem<T, Quant, space::host, experts::Reference<>> host;
  Problem<T, Quant, space::cuda, experts::CudaReference> device;
  for (std::int64_t rows : {1, 7, 64, 0}) {
    auto const want = host.forward(rows, 100 + static_cast<unsigned>(rows));
    auto const got = device.forward(rows, 100 + static_cast<unsigned>(rows));
    ASSERT_EQ(got.size(), want.size());
    double error = 0;
    double norm = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_TRUE(std::isfinite(got[i])) << "row " << i / kHidden;
      error += std::pow(static_cast<double>(got[i]) - static_cast<double>(want[i]), 2);
      norm += std::pow(static_cast<double>(want[i]), 2);
    }
    if (rows > 0) {
      EXPECT_LT(std::sqrt(error / norm), tolerance) << rows << " rows";
    }
    std::vector<std::int32_t> ids(static_cast<std::size_t>(rows * kTopK));
    if (rows > 0) {
      Memory<space::cuda>::copy_to_host(ids.data(), device.layer().topk_ids().data_handle(), ids.size() * sizeof(std::int32_t));
    }
    for (std::size_t i = 0; i < ids.size(); ++i) {
      EXPECT_EQ(ids[i], host.layer().topk_ids().data_handle()[i]) << "slot " << i;
    }
  }
}

TEST(CudaLayer, Float32EqualsHost) { host_equals_device<float, quantization::None>(1e-6); }
TEST(CudaLayer, Bf16EqualsHost) { host_equals_device<bf16, quantization::None>(2e-3); }
TEST(CudaLayer, Fp8BlockEqualsHost) {
  host_equals_device<float, quantization::Fp8Block<>>(2e-2);
}  // a requantised value may change by one code

TEST(CudaLayer, GraphReplaysWithNewInputs) {
  Problem<float, quantization::None, space::cuda, experts::CudaReference> captured;
  Problem<float, quantization::None, space::cuda, experts::CudaReference> direct;
  CudaStream stream;
  captured.fill(16, 1);
  captured.launch(16, stream);  // modules must be loaded outside the capture
  stream.synchronize();
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  captured.launch(16, stream);
  check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  for (unsigned seed : {11U, 12U, 13U}) {
    captured.fill(16, seed);
    check_cuda(cudaGraphLaunch(executable, stream), "cudaGraphLaunch");
    stream.synchronize();
    std::vector<float> y(kMaxTokens * kHidden);
    captured.output().copy_to_host(y.data());
    auto const want = direct.forward(16, seed);
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(y[i], want[i]) << "seed " << seed << " at " << i;
    }
  }
  check_cuda(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  check_cuda(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

// Rows without a finite logit are counted on the device as on the host, and their experts are the same.
TEST(CudaLayer, R6_RowsWithoutAFiniteLogitAreCounted) {
  Problem<float, quantization::None, space::host, experts::Reference<>> host;
  Problem<float, quantization::None, space::cuda, experts::CudaReference> device;
  for (std::int64_t counted : {0, 3, 6}) {
    EXPECT_EQ(host.layer().counters().degenerate_rows, counted);
    EXPECT_EQ(device.layer().counters().degenerate_rows, counted);
    auto spoil = [](auto& problem) {
      problem.fill(kMaxTokens, 7);
      std::vector<float> logits(static_cast<std::size_t>(kMaxTokens * kExperts));
      problem.logits().copy_to_host(logits.data());
      for (std::int64_t row : {0, 9, 63}) {
        std::fill_n(logits.begin() + row * kExperts, kExperts, std::numeric_limits<float>::quiet_NaN());
      }
      logits[kExperts] = std::numeric_limits<float>::quiet_NaN();  // row 1: one expert only
      problem.logits().copy_from_host(logits.data());
    };
    spoil(host);
    host.launch(kMaxTokens, {});
    spoil(device);
    device.launch(kMaxTokens, nullptr);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    std::vector<std::int32_t> ids(static_cast<std::size_t>(kMaxTokens * kTopK));
    check_cuda(cudaMemcpy(ids.data(), device.layer().topk_ids().data_handle(), ids.size() * sizeof(ids[0]), cudaMemcpyDeviceToHost),
               "cudaMemcpy");
    EXPECT_TRUE(std::equal(ids.begin(), ids.end(), host.layer().topk_ids().data_handle()));
    EXPECT_EQ(ids[0], 0);
    EXPECT_EQ(ids[1], 1);
  }
}

}  // namespace
