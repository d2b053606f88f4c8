// SPDX-License-Identifier: Apache-2.0
// tests/gpu/cuda_layer_test.cu: a whole layer in the CUDA space equals the same composition in the host space: the same headers, the same
// types but for the space. Random routing with masked experts, both formats of rows, poisoned outputs, zero rows, a captured graph.
// moe-alone: it is compiled for every architecture.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "../expect_error.hpp"
#include "moe/activation/activation.hpp"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/core/cuda_graph.hpp"
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

/// Chooses as Router, in a launch of its own: it has neither Config nor the base class RowRouter<Config>.
class OwnLaunch {
 public:
  static constexpr char const* kName = "own_launch";
  static constexpr bool kWeightOnInput = false;
  using Params = Router::Params;
  explicit OwnLaunch(Params const& p) : inner_(p) {}
  int num_experts() const { return inner_.num_experts(); }
  int topk() const { return inner_.topk(); }
  int num_logits() const { return inner_.num_logits(); }
  int num_slots() const { return inner_.num_slots(); }
  template <class L>
  void select(routing::RouteArgs<L> const& a, Stream<space::cuda> stream) const {
    inner_.select(a, stream);
  }

 private:
  Router inner_;
};

template <class T, class Quant, class Space, class Experts, class RouterT = Router>
class Problem {
 public:
  using Layer = ModularKernel<Config<T>, RouterT, Quant, backends::NoExpertParallel<Space>, Experts>;

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
  /// The output over the input, `at` elements behind its beginning.
  void launch_over_input(std::int64_t rows, std::int64_t at) {
    layer_.forward(make_rows(static_cast<T const*>(hidden_.data()), rows, kHidden),
                   make_rows(static_cast<float const*>(logits_.data()), rows, kExperts), make_rows(hidden_.data() + at, rows, kHidden), {},
                   Stream<Space>{});
  }
  /// An output that begins on the last 16 bytes of the logits. It is refused, so that the memory behind them does not matter.
  void launch_over_logits(std::int64_t rows) {
    auto* const output = reinterpret_cast<T*>(logits_.data() + rows * kExperts - 4);
    layer_.forward(make_rows(static_cast<T const*>(hidden_.data()), rows, kHidden),
                   make_rows(static_cast<float const*>(logits_.data()), rows, kExperts), make_rows(output, rows, kHidden), {},
                   Stream<Space>{});
  }
  std::vector<float> forward_in_place(std::int64_t rows, unsigned seed) {
    fill(rows, seed);
    launch_over_input(rows, 0);
    std::vector<T> y(static_cast<std::size_t>(kMaxTokens * kHidden));
    hidden_.copy_to_host(y.data());
    std::vector<float> out;
    for (std::int64_t i = 0; i < rows * kHidden; ++i) out.push_back(to_float(y[static_cast<std::size_t>(i)]));
    return out;
  }
  /// Routes nothing: ids and weights [rows, kTopK] of the host.
  template <class Id>
  std::vector<T> forward_routed(std::int64_t rows, std::vector<Id> const& ids, std::vector<float> const& weights,
                                ForwardOptions const& options = {}) {
    Buffer<Id, Space> device_ids(rows * kTopK);
    Buffer<float, Space> device_weights(rows * kTopK);
    device_ids.copy_from_host(ids.data());
    device_weights.copy_from_host(weights.data());
    layer_.forward_routed(make_rows(static_cast<T const*>(hidden_.data()), rows, kHidden),
                          make_rows(static_cast<Id const*>(device_ids.data()), rows, kTopK),
                          make_rows(static_cast<float const*>(device_weights.data()), rows, kTopK),
                          make_rows(output_.data(), rows, kHidden), options, Stream<Space>{});
    std::vector<T> y(static_cast<std::size_t>(kMaxTokens * kHidden));
    output_.copy_to_host(y.data());
    y.resize(static_cast<std::size_t>(rows * kHidden));
    return y;
  }
  static typename Layer::Params params() {
    return {.shape = {kHidden, kIntermediate, kExperts, kTopK, false},
            .max_tokens_per_rank = kMaxTokens,
            .placement = ExpertPlacement(kExperts, 1),
            .router = typename Router::Params{kExperts, kTopK}};
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

template <class Quant, class Space, class Experts>
void output_is_the_input_or_apart() {
  Problem<bf16, Quant, Space, Experts> layer;
  for (std::int64_t rows : {1, 7, 64}) EXPECT_EQ(layer.forward_in_place(rows, 9), layer.forward(rows, 9)) << rows << " rows";
  layer.launch_over_input(7, 7 * kHidden);
  layer.launch_over_input(0, 8);
  for (std::int64_t at : {8, kHidden, 6 * kHidden}) {
    moe_test::expect_error(ErrorCode::argument, text("output: it begins ", 2 * at, " bytes from hidden_states"),
                           [&] { layer.launch_over_input(7, at); });
  }
  moe_test::expect_error(ErrorCode::argument, "output: its memory overlaps that of router_logits", [&] { layer.launch_over_logits(7); });
}
TEST(CudaLayer, OutputIsTheInputOrApartFromIt) {
  output_is_the_input_or_apart<quantization::None, space::host, experts::Reference<>>();
  output_is_the_input_or_apart<quantization::None, space::cuda, experts::CudaReference>();
  output_is_the_input_or_apart<quantization::Fp8Block<>, space::cuda, experts::CudaReference>();
}

TEST(CudaLayer, ARouterWithALaunchOfItsOwn) {
  Problem<float, quantization::None, space::cuda, experts::CudaReference> by_row;
  Problem<float, quantization::None, space::cuda, experts::CudaReference, OwnLaunch> own;
  EXPECT_EQ(own.forward(7, 107), by_row.forward(7, 107));

  std::vector<std::int32_t> physical(kExperts), ones(kExperts, 1);
  for (int e = 0; e < kExperts; ++e) physical[static_cast<std::size_t>(e)] = e;
  Buffer<std::int32_t, space::cuda> table(kExperts), counts(kExperts);
  table.copy_from_host(physical.data());
  counts.copy_from_host(ones.data());
  using Layer = decltype(own)::Layer;
  experts::WeightStore<Config<float>, quantization::None, space::cuda> store(kExperts, kHidden, kIntermediate, true);
  std::vector<float> const w13(2 * kIntermediate * kHidden), w2(kHidden * kIntermediate);
  for (int e = 0; e < kExperts; ++e) store.set_expert(e, w13.data(), w2.data());
  comm::Self<space::cuda> comm;
  Layer::Params params = decltype(own)::params();
  params.mapping = {.num_experts = kExperts,
                    .num_physical = kExperts,
                    .max_replicas = 1,
                    .logical_to_physical = table.data(),
                    .replica_count = counts.data()};
  try {
    Layer const mapped(comm, store.view(), params);
    ADD_FAILURE() << "the layer took the mapping";
  } catch (Error const& e) {
    EXPECT_EQ(e.code(), ErrorCode::unsupported) << e.what();
    EXPECT_NE(std::string(e.what()).find("own_launch has a launch of its own"), std::string::npos) << e.what();
  }
}

TEST(CudaLayer, GraphReplaysWithNewInputs) {
  Problem<float, quantization::None, space::cuda, experts::CudaReference> captured;
  Problem<float, quantization::None, space::cuda, experts::CudaReference> direct;
  CudaStream stream;
  captured.fill(16, 1);
  captured.launch(16, stream);  // modules must be loaded outside the capture
  stream.synchronize();
  CudaGraph const graph(stream, [&] { captured.launch(16, stream); });
  for (unsigned seed : {11U, 12U, 13U}) {
    captured.fill(16, seed);
    graph.launch(stream);
    stream.synchronize();
    std::vector<float> y(kMaxTokens * kHidden);
    captured.output().copy_to_host(y.data());
    auto const want = direct.forward(16, seed);
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_EQ(y[i], want[i]) << "seed " << seed << " at " << i;
    }
  }
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

// Routing from the caller: the bits of forward(). An invalid slot counts as no expert, is counted, and check() names it once.
TEST(CudaLayer, RoutingOfTheCaller) {
  Problem<float, quantization::None, space::cuda, experts::CudaReference> device;
  auto const want = device.forward(kMaxTokens, 21);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(kMaxTokens * kTopK));
  std::vector<float> weights(ids.size());
  Memory<space::cuda>::copy_to_host(ids.data(), device.layer().topk_ids().data_handle(), ids.size() * sizeof(ids[0]));
  Memory<space::cuda>::copy_to_host(weights.data(), device.layer().topk_weights().data_handle(), weights.size() * sizeof(weights[0]));
  auto got = device.forward_routed(kMaxTokens, ids, weights);
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_EQ(got[i], want[i]) << i;
  device.layer().check();
  EXPECT_EQ(device.layer().counters().invalid_slots, 0);

  auto const no_expert = [&](std::vector<std::int32_t> clean, std::vector<std::size_t> const& slots) {
    for (std::size_t slot : slots) clean[slot] = kNoExpert;
    return clean;
  };
  auto const expect_reported = [&](std::string const& sentence) {
    try {
      device.layer().check();
      ADD_FAILURE() << "no error, expected " << sentence;
    } catch (Error const& e) {
      EXPECT_EQ(e.code(), ErrorCode::argument);
      EXPECT_NE(std::string(e.what()).find(sentence), std::string::npos) << e.what();
    }
    device.layer().check();  // reported once
  };
  auto bad_ids = ids;
  auto bad_weights = weights;
  bad_ids[5 * kTopK + 2] = kExperts;
  auto const clean = device.forward_routed(kMaxTokens, no_expert(ids, {5 * kTopK + 2}), weights);
  EXPECT_EQ(device.forward_routed(kMaxTokens, bad_ids, weights), clean);
  expect_reported("topk_ids[5, 2]: 16 is out of range [-1, 16)");
  bad_ids = ids;
  bad_ids[7 * kTopK + 3] = bad_ids[7 * kTopK];
  EXPECT_EQ(device.forward_routed(kMaxTokens, bad_ids, weights),
            device.forward_routed(kMaxTokens, no_expert(ids, {7 * kTopK + 3}), weights));
  expect_reported(text("topk_ids[7, 3]: ", bad_ids[7 * kTopK], " occurs twice in its row"));
  bad_weights[9 * kTopK + 1] = std::numeric_limits<float>::infinity();
  EXPECT_EQ(device.forward_routed(kMaxTokens, ids, bad_weights),
            device.forward_routed(kMaxTokens, no_expert(ids, {9 * kTopK + 1}), weights));
  expect_reported("topk_weights[9, 1]: inf is not finite");
  EXPECT_EQ(device.layer().counters().invalid_slots, 3);

  // int64: the same bits; an id whose low half is an expert is no expert.
  std::vector<std::int64_t> wide(ids.begin(), ids.end());
  EXPECT_EQ(device.forward_routed(kMaxTokens, wide, weights), want);
  device.layer().check();
  wide[5 * kTopK + 2] += std::int64_t{1} << 32;
  EXPECT_EQ(device.forward_routed(kMaxTokens, wide, weights), clean);
  expect_reported(text("topk_ids[5, 2]: ", wide[5 * kTopK + 2], " is out of range [-1, 16)"));
  EXPECT_EQ(device.layer().counters().invalid_slots, 4);

  // Padding is not checked, whether the host or only the device knows where it begins.
  bad_ids = ids;
  std::fill(bad_ids.begin() + 10 * kTopK, bad_ids.end(), 1000);
  (void)device.forward_routed(kMaxTokens, bad_ids, weights, {.num_valid_rows = 10});
  Buffer<std::int32_t, space::cuda> rows(1);
  std::int32_t const ten = 10;
  rows.copy_from_host(&ten);
  got = device.forward_routed(kMaxTokens, bad_ids, weights, {.num_rows = rows.data()});
  device.layer().check();
  EXPECT_EQ(device.layer().counters().invalid_slots, 4);
  for (std::size_t i = 0; i < 10 * kHidden; ++i) ASSERT_EQ(got[i], want[i]) << i;
}

}  // namespace
