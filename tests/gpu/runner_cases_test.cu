// SPDX-License-Identifier: Apache-2.0
// tests/gpu/runner_cases_test.cu: a runner on one GPU: its wrong calls and constructions, row by row, a forward while weights move, and a
// call that works afterwards; load recording with chunks and rows of no batch (N22); chunks of stated rows allocate nothing and wait for
// nothing, and others say before any work that they cannot be captured; the kernels of a block; shared experts that give other rows; a gate
// in the model's type. Logits with a gate inside, or none without one, do not compile (compile_fail/runner_logits.cpp).
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "device_values.cuh"
#include "expect_error.hpp"
#include "forward_costs.cuh"
#include "moe/activation/activation.hpp"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/core/cuda_graph.hpp"
#include "moe/eplb/hold_forwards.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/runner/device/captured_sizes.hpp"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/linear.cuh"
#include "moe/runner/device/ranks.hpp"
#include "moe/runner/device/row_kernels.cuh"
#include "moe/runner/runner.hpp"
#include "numbers.hpp"

namespace {

using namespace moe;
using moe_test::bf16_numbers;
using moe_test::DeviceBuffer;
using moe_test::expect_error;
using moe_test::floats;
using moe_test::upload;
using Cuda = space::cuda;
constexpr int kHidden = 64, kIntermediate = 32, kExperts = 6, kTopK = 2;
constexpr std::int64_t kMost = 7;

struct Config : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
using Layer = ModularKernel<Config, routing::AnyRouter, quantization::None, backends::NoExpertParallel<Cuda>, experts::CudaReference>;
struct Plain : RunnerDefaults {
  using Scaling = runner::scaling::Factor;
};
struct Chunked : Plain {
  using Chunking = runner::chunking::Lockstep;
};

/// A gate, shared experts and a factor around the layer.
struct WithShared : Plain {
  using Gate = runner::gate::Linear<float>;
  using Shared = runner::shared::Dense<bf16>;
};

/// Shared experts of a caller, of whose output `missing_rows` rows are missing.
std::int64_t missing_rows = 0;
template <class Space, class Act>
class ShortPart : public runner::shared::Dense<bf16>::Part<Space, Act> {
  using Base = runner::shared::Dense<bf16>::Part<Space, Act>;

 public:
  using Base::Base;
  std::int64_t rows() const { return Base::rows() - missing_rows; }
};
struct ShortShared : runner::shared::Dense<bf16> {
  template <class Space, class Act>
  using Part = ShortPart<Space, Act>;
};
struct WithShortShared : WithShared {
  using Shared = ShortShared;
};

/// Logits in the model's type, and in float32 of the same weights.
struct ModelGate : Plain {
  using Gate = runner::gate::Linear<bf16, runner::gate::Precision::model>;
};
struct Float32Gate : Plain {
  using Gate = runner::gate::Linear<bf16>;
};

/// A gate and shared experts on the device.
struct AroundLayer {
  static constexpr std::int64_t kWidth = 48;
  DeviceBuffer<float> gate = upload(bf16_numbers(31, kExperts* kHidden));
  DeviceBuffer<bf16> w13 = narrow(bf16_numbers(32, 2 * kWidth * kHidden)), w2 = narrow(bf16_numbers(33, kHidden* kWidth));

  static DeviceBuffer<bf16> narrow(std::vector<float> const& values) {
    std::vector<bf16> out;
    for (float const v : values) out.push_back(from_float<bf16>(v));
    return upload(out);
  }
  template <class P>
  void set(P& p) const {
    p.gate.weight = make_rows(gate.data(), kExperts, kHidden);
    p.scaling.routed = 1.5F;
    p.shared.count = 1;
    p.shared.intermediate = kWidth;
    p.shared.activation = {activation::Kind::silu, {}};
    auto const matrix = [](auto& to, DeviceBuffer<bf16> const& from, std::int64_t rows, std::int64_t cols) {
      to.codes = make_blocks(from.data(), 1, rows, cols);
      to.rows = rows;
      to.cols = cols;
    };
    matrix(p.shared.weights.w13, w13, 2 * kWidth, kHidden);
    matrix(p.shared.weights.w2, w2, kHidden, kWidth);
  }
};

class RunnerCases : public testing::Test {
 protected:
  RunnerCases() {
    for (int e = 0; e < kExperts; ++e) {
      int const seed = 10 + 2 * e;
      store.set_expert(e, bf16_numbers(seed, 2 * kIntermediate * kHidden).data(), bf16_numbers(seed + 1, kHidden * kIntermediate).data());
    }
    std::vector<bf16> values;
    for (float const v : bf16_numbers(1, x.size())) values.push_back(from_float<bf16>(v));
    x.copy_from_host(values.data());
    logits.copy_from_host(bf16_numbers(2, logits.size()).data());
    std::vector<std::int32_t> ids(kExperts);
    std::iota(ids.begin(), ids.end(), 0);
    slots.copy_from_host(ids.data());
    ones.copy_from_host(std::vector<std::int32_t>(kExperts, 1).data());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  template <class R>
  typename R::Params params(std::int64_t capacity) const {
    return {.layer = {.shape = {kHidden, kIntermediate, kExperts, kTopK, false},
                      .max_tokens_per_rank = capacity,
                      .placement = ExpertPlacement(kExperts, 1),
                      .router = {.num_experts = kExperts, .topk = kTopK}}};
  }
  /// With the identity as a mapping.
  template <class P>
  P recorded(P p) {
    p.layer.mapping = {.num_experts = kExperts,
                       .num_physical = kExperts,
                       .max_replicas = 1,
                       .logical_to_physical = slots.data(),
                       .replica_count = ones.data()};
    p.layer.load.load_counter = counted.data();
    return p;
  }
  /// Output of the first `rows` rows; the rest of `y` stays NaN. call(hidden, output) enqueues them.
  template <class R, class Call>
  std::vector<float> output_of(R& runner, std::int64_t rows, Call const& call) {
    Memory<Cuda>::fill(y.data(), 0xff, y.bytes());
    Memory<Cuda>::fill(counted.data(), 0, counted.bytes());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    call(make_rows(static_cast<bf16 const*>(x.data()), rows, kHidden), make_rows(y.data(), rows, kHidden));
    runner.wait(stream);
    stream.synchronize();
    runner.check();
    std::vector<float> out = floats(y);
    out.resize(static_cast<std::size_t>(rows * kHidden));
    return out;
  }
  template <class R>
  std::vector<float> run(R& runner, std::int64_t rows) {
    return output_of(runner, rows, [&](auto hidden, auto output) {
      runner.forward(hidden, make_rows(static_cast<float const*>(logits.data()), rows, kExperts), output, {}, stream);
    });
  }
  template <class R>
  std::vector<float> run_routed(R& runner, std::int64_t rows, DeviceBuffer<std::int64_t> const& ids, DeviceBuffer<float> const& weights) {
    return output_of(runner, rows, [&](auto hidden, auto output) {
      runner.forward_routed(hidden, make_rows(ids.data(), rows, kTopK), make_rows(weights.data(), rows, kTopK), output, {}, stream);
    });
  }
  std::vector<std::int32_t> counts() {
    std::vector<std::int32_t> out(kExperts);
    counted.copy_to_host(out.data());
    return out;
  }

  comm::Self<Cuda> self;
  CudaStream stream;
  experts::WeightStore<Config, quantization::None, Cuda> store{kExperts, kHidden, kIntermediate, true};
  DeviceBuffer<bf16> x{(kMost + 1) * kHidden}, y{(kMost + 1) * kHidden};
  DeviceBuffer<float> logits{(kMost + 1) * kExperts};
  DeviceBuffer<std::int32_t> slots{kExperts}, ones{kExperts}, counted{kExperts};  // the identity as a mapping, so that slots are counted
};

TEST_F(RunnerCases, WrongCallsRowByRow) {
  using R = Runner<Layer, Plain>;
  R runner(self, store.view(), params<R>(kMost));
  std::vector<float> const want = run(runner, 3);
  struct Row {
    ErrorCode code;
    char const* text;
    std::int64_t rows = 3, hidden = kHidden, logit_rows = 3, logit_columns = kExperts, out_rows = 3, out_hidden = kHidden;
  };
  std::vector<Row> const wrong{
      {ErrorCode::argument, "hidden_states: width: 56, expected 64", 3, kHidden - 8},
      {ErrorCode::argument, "output: width: 56, expected 64", 3, kHidden, 3, kExperts, 3, kHidden - 8},
      {ErrorCode::argument, "output: rows: 2, expected 3", 3, kHidden, 3, kExperts, 2},
      {ErrorCode::argument, "router_logits: rows: 2, expected 3", 3, kHidden, 2},
      {ErrorCode::argument, "router_logits: width: 5, expected 6", 3, kHidden, 3, kExperts - 1},
      {ErrorCode::capacity, "hidden_states: 8 rows exceed max_tokens_per_rank 7", kMost + 1, kHidden, kMost + 1, kExperts,
       kMost + 1},  // N21
  };
  for (Row const& r : wrong) {
    SCOPED_TRACE(r.text);
    Memory<Cuda>::fill(y.data(), 0xff, y.bytes());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    expect_error(r.code, r.text, [&] {
      runner.forward(make_rows(static_cast<bf16 const*>(x.data()), r.rows, r.hidden),
                     make_rows(static_cast<float const*>(logits.data()), r.logit_rows, r.logit_columns),
                     make_rows(y.data(), r.out_rows, r.out_hidden), {}, stream);
    });
    stream.synchronize();
    std::vector<float> const untouched = floats(y);
    EXPECT_TRUE(std::all_of(untouched.begin(), untouched.end(), [](float v) { return std::isnan(v); }));
    EXPECT_EQ(run(runner, 3), want);
  }
}

// Whole and in chunks: nothing is written, and the call after the move works.
TEST_F(RunnerCases, ForwardWhileWeightsMove) {
  using Whole = Runner<Layer, Plain>;
  using Cut = Runner<Layer, Chunked>;
  Whole whole(self, store.view(), params<Whole>(kMost));
  Cut cut(self, store.view(), params<Cut>(3));
  std::vector<float> const want = run(whole, kMost);
  auto const refuses = [&](auto& runner) {
    {
      std::array const users{&runner.weight_move()};
      eplb::HoldForwards const held(3, users);
      expect_error(ErrorCode::state, "forward: the weights of layer 3 are being moved", [&] { run(runner, kMost); });
    }
    stream.synchronize();
    std::vector<float> const untouched = floats(y);
    EXPECT_TRUE(std::all_of(untouched.begin(), untouched.end(), [](float v) { return std::isnan(v); }));
    EXPECT_EQ(run(runner, kMost), want);
  };
  refuses(whole);
  refuses(cut);
}

// With the routing of a forward before, a caller gets its bits, its counts, and in chunks the same; kernels find an invalid slot.
TEST_F(RunnerCases, RoutedByTheCaller) {
  using Whole = Runner<Layer, Plain>;
  using Cut = Runner<Layer, Chunked>;
  Whole whole(self, store.view(), recorded(params<Whole>(kMost)));
  Cut cut(self, store.view(), recorded(params<Cut>(3)));
  std::vector<float> const want = run(whole, kMost);
  std::vector<std::int32_t> const slots_of_forward = counts();
  std::vector<std::int32_t> chosen(kMost * kTopK);
  std::vector<float> chosen_weights(chosen.size());
  Memory<Cuda>::copy_to_host(chosen.data(), whole.topk_ids().data_handle(), chosen.size() * sizeof(std::int32_t));
  Memory<Cuda>::copy_to_host(chosen_weights.data(), whole.topk_weights().data_handle(), chosen_weights.size() * sizeof(float));
  std::vector<std::int64_t> const wide(chosen.begin(), chosen.end());
  DeviceBuffer<std::int64_t> ids(kMost * kTopK);
  DeviceBuffer<float> weights(kMost * kTopK);
  ids.copy_from_host(wide.data());
  weights.copy_from_host(chosen_weights.data());
  EXPECT_EQ(run_routed(whole, kMost, ids, weights), want);
  EXPECT_EQ(counts(), slots_of_forward);
  EXPECT_EQ(run_routed(cut, kMost, ids, weights), want);
  EXPECT_EQ(counts(), slots_of_forward);
  EXPECT_TRUE(run_routed(cut, 0, ids, weights).empty());

  std::vector<std::int64_t> wrong = wide;
  wrong[kTopK] = kExperts;
  ids.copy_from_host(wrong.data());
  expect_error(ErrorCode::argument, "topk_ids[1, 0]: 6 is out of range [-1, 6)", [&] { run_routed(whole, kMost, ids, weights); });
  ids.copy_from_host(wide.data());
  EXPECT_EQ(run_routed(whole, kMost, ids, weights), want);
}

TEST_F(RunnerCases, WrongConstructionsRowByRow) {
  using R = Runner<Layer, Chunked>;
  auto const construct = [&](int chunk, float in_weights, float on_output) {
    auto p = params<R>(kMost);
    p.layer.router.routed_scaling_factor = in_weights;
    p.chunking.rows = chunk;
    p.scaling.routed = on_output;
    R const runner(self, store.view(), p);
  };
  expect_error(ErrorCode::config, "chunk size: 8 is out of range [1, max_tokens_per_rank 7]", [&] { construct(8, 1, 1); });
  expect_error(ErrorCode::config, "chunk size: -1 is out of range [1, max_tokens_per_rank 7]", [&] { construct(-1, 1, 1); });
  expect_error(ErrorCode::config, "routed_scaling_factor: 2.5 in the routing weights and 2 on the output", [&] { construct(7, 2.5F, 2); });
  construct(7, 2.5F, 1);
}

TEST_F(RunnerCases, N22_RecordingWithChunksAndRowsOfNoBatch) {
  using Whole = Runner<Layer, Plain>;
  using R = Runner<Layer, Chunked>;
  Whole whole(self, store.view(), recorded(params<Whole>(kMost)));
  for (ChunkMode mode : {ChunkMode::exact, ChunkMode::min_one}) {
    for (std::int64_t const most : {0, 7}) {  // stated rows: passes without rows of the batch
      auto p = recorded(params<R>(2));
      p.chunking.mode = mode;
      p.chunking.most_rows = most;
      R chunked(self, store.view(), p);
      for (std::int64_t const rows : {7, 3, 1, 0}) {
        SCOPED_TRACE(text(rows, " rows, mode ", static_cast<int>(mode), ", most ", most));
        std::vector<float> const want = run(whole, rows);
        std::vector<std::int32_t> const slot_counts = counts();
        EXPECT_EQ(std::accumulate(slot_counts.begin(), slot_counts.end(), 0), rows * kTopK);
        EXPECT_EQ(run(chunked, rows), want);
        EXPECT_EQ(counts(), slot_counts) << "slots of real rows only";
      }
    }
  }
}

/// Four passes of two rows, the last ones without rows where the batch has fewer.
TEST_F(RunnerCases, ChunksOfStatedRowsEnqueueOnly) {
  using R = Runner<Layer, Chunked>;
  for (ChunkMode mode : {ChunkMode::exact, ChunkMode::min_one}) {
    auto p = params<R>(2);
    p.chunking.mode = mode;
    p.chunking.most_rows = kMost;
    R chunked(self, store.view(), p);
    for (std::int64_t const rows : {kMost, std::int64_t{3}}) {
      std::vector<float> const want = run(chunked, rows);
      std::string const name = text("chunks, ", rows, " rows, mode ", static_cast<int>(mode));
      moe_test::expect_enqueues_only(stream, name.c_str(), [&] {
        chunked.forward(make_rows(static_cast<bf16 const*>(x.data()), rows, kHidden),
                        make_rows(static_cast<float const*>(logits.data()), rows, kExperts), make_rows(y.data(), rows, kHidden), {},
                        stream);
      });
      EXPECT_EQ(run(chunked, rows), want);
    }
  }
}

// Ranks that agree in each forward: a capture names the parameter before any work. With it, the chunks go into a graph.
TEST_F(RunnerCases, ChunksSayWhatCannotBeCaptured) {
  using R = Runner<Layer, Chunked>;
  R asks(self, store.view(), params<R>(2));
  std::vector<float> const want = run(asks, kMost);
  auto p = params<R>(2);
  p.chunking.most_rows = kMost;
  R stated(self, store.view(), p);
  auto const forward = [&](R& runner, std::int64_t rows, cudaStream_t s) {
    runner.forward(make_rows(static_cast<bf16 const*>(x.data()), rows, kHidden),
                   make_rows(static_cast<float const*>(logits.data()), rows, kExperts), make_rows(y.data(), rows, kHidden), {}, s);
  };
  std::vector<std::int64_t> const sizes{kMost};
  {
    runner::CapturedSizes<Cuda> graphs;
    expect_error(ErrorCode::state, "capture: chunks: most_rows is 0", [&] {
      graphs.capture(self, sizes, capture_obstacle(asks), [](std::int64_t, cudaStream_t) { FAIL() << "work was issued"; });
    });
    EXPECT_EQ(capture_obstacle(stated), "");
    graphs.capture(self, sizes, capture_obstacle(stated), [&](std::int64_t rows, cudaStream_t s) { forward(stated, rows, s); });
    Memory<Cuda>::fill(y.data(), 0xff, y.bytes());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    graphs.replay(kMost, stream);
    stream.synchronize();
    std::vector<float> replayed = floats(y);
    replayed.resize(want.size());
    EXPECT_EQ(replayed, want);
  }
  expect_error(ErrorCode::state, "capture: chunks: most_rows is 0",
               [&] { CudaGraph const graph(stream, [&] { forward(asks, kMost, stream); }); });
  EXPECT_EQ(run(asks, kMost), want) << "the refused capture left nothing behind";
}

/// expect_enqueues_only() would see an allocation.
TEST_F(RunnerCases, AllocationsAreSeen) {
  EXPECT_FALSE(moe_test::allocates_on_device([&] { Memory<Cuda>::fill_async(y.data(), 0, y.bytes(), stream); }));
  EXPECT_TRUE(moe_test::allocates_on_device([&] { DeviceBuffer<float> const memory(1000); }));
  EXPECT_FALSE(moe_test::allocates_on_device([&] { Memory<Cuda>::fill_async(y.data(), 0, y.bytes(), stream); }));
  stream.synchronize();
}

/// A block with a gate, shared experts and a factor launches what its gate, its layer and its shared experts launch alone, and one kernel
/// that reads the routed output, scales it and adds the shared output. The gate is one kernel where its float32 weights are read in each
/// call, and cuBLASLt's where they are values of bf16. A side stream adds no node, and makes layer and shared experts two paths of the
/// graph: no node of one waits for a node of the other.
TEST_F(RunnerCases, KernelsOfABlock) {
  using R = Runner<Layer, WithShared>;
  constexpr std::int64_t kRows = 5;
  using Shared = runner::shared::Dense<bf16>;
  AroundLayer const around;
  Rows<bf16 const> const hidden = make_rows(static_cast<bf16 const*>(x.data()), kRows, kHidden);
  Rows<bf16> const output = make_rows(y.data(), kRows, kHidden);

  auto p = params<R>(kMost);
  Layer layer(self, store.view(), p.layer);
  moe_test::GraphNodes const routed = moe_test::graph_nodes(
      stream, [&] { layer.forward(hidden, make_rows(static_cast<float const*>(logits.data()), kRows, kExperts), output, {}, stream); });
  // The routing, ids, rows, two products, and the rounding of their float32 sums.
  EXPECT_EQ(routed, (moe_test::GraphNodes{6, 0}));

  around.set(p);
  using runner::WeightReads;
  constexpr std::pair<std::int64_t, WeightReads> kCases[] = {
      {0, WeightReads::once}, {kRows, WeightReads::once}, {kRows, WeightReads::every_call}};
  for (auto const& [overlap_rows, reads] : kCases) {
    Arena<Cuda> arena;
    SCOPED_TRACE(text("shared experts beside the layer up to ", overlap_rows, " rows"));
    p.gate.reads = reads;
    runner::gate::Linear<float>::Part<Cuda, bf16> logits_of(p.gate, {kHidden, kHidden, kMost}, arena);
    moe_test::GraphNodes const gates = moe_test::graph_nodes(stream, [&] { logits_of.logits(hidden, stream); });
    EXPECT_GE(gates.kernels, 1U);
    if (reads == WeightReads::every_call) {
      EXPECT_EQ(gates, (moe_test::GraphNodes{1, 0}));
    }
    p.shared.overlap_rows = overlap_rows;
    Shared::Part<Cuda, bf16> part(p.shared, {kHidden, kHidden, kMost}, arena);
    moe_test::GraphNodes const shared = moe_test::graph_nodes(stream, [&] {
      part.run(hidden, {}, stream);
      part.output();
    });
    EXPECT_GE(shared.kernels, 3U) << "two products and the activation";
    R block(self, store.view(), p);
    EXPECT_EQ(block.gate_choice(), logits_of.choice());
    EXPECT_EQ(block.unread_gate_weight(), logits_of.unread_weight());
    moe_test::CapturedCall const captured(stream, [&] { block.forward(hidden, output, {}, stream); });
    moe_test::GraphNodes const whole = captured.nodes();
    EXPECT_EQ(whole, (moe_test::GraphNodes{routed.kernels + gates.kernels + shared.kernels + 1, gates.others + shared.others}))
        << "layer: " << routed << "; gate: " << gates << "; shared experts: " << shared;
    EXPECT_EQ(captured.beside(), overlap_rows == 0 ? std::vector<std::size_t>(whole.all(), 0)  // one after the other
                                                   : moe_test::two_paths(gates.all() + 1, routed.all(), shared.all()));
    std::printf("a block of %zu kernels: %zu of the layer, %zu of the gate, %zu of the shared experts\n", whole.kernels, routed.kernels,
                gates.kernels, shared.kernels);
  }
}

/// Before the layer has run and with the side stream forked; the next forward works.
TEST_F(RunnerCases, SharedOutputOfOtherRowsIsAnInternalError) {
  using R = Runner<Layer, WithShortShared>;
  AroundLayer const around;
  for (std::int64_t const overlap_rows : {std::int64_t{0}, kMost}) {
    SCOPED_TRACE(text("shared experts beside the layer up to ", overlap_rows, " rows"));
    auto p = params<R>(kMost);
    around.set(p);
    p.shared.overlap_rows = overlap_rows;
    R runner(self, store.view(), p);
    auto const forward = [&](auto hidden, auto output) { runner.forward(hidden, output, {}, stream); };
    std::vector<float> const want = output_of(runner, 3, forward);
    for (std::int64_t const missing : {1, 3, -1}) {
      missing_rows = missing;
      expect_error(ErrorCode::internal, text("shared experts: ", 3 - missing, " rows of output for 3 rows"),
                   [&] { output_of(runner, 3, forward); });
      missing_rows = 0;
      stream.synchronize();
      std::vector<float> const untouched = floats(y);
      EXPECT_TRUE(std::all_of(untouched.begin(), untouched.end(), [](float v) { return std::isnan(v); }));
      EXPECT_EQ(output_of(runner, 3, forward), want);
    }
  }
}

/// Sums are exact in float32 in any order: rows are multiples of 1/8, weights of 1/64. Expert 1 has the weights of expert 0 but for the
/// first column, where it has 1/64 more: its logit is larger, and in bf16 the same where that is less than the last bit. Then the router
/// takes expert 0 first, and equal weights.
TEST_F(RunnerCases, N17_GateInTheModelsType) {
  std::vector<bf16> rows, weights;
  std::vector<float> exact(kMost * kExperts), rounded(exact.size());
  for (int t = 0; t < kMost; ++t) {
    for (int i = 0; i < kHidden; ++i) rows.push_back(from_float<bf16>(static_cast<float>(1 + (5 * i + 3 * t) % 8) / 8));
  }
  for (int e = 0; e < kExperts; ++e) {
    for (int i = 0; i < kHidden; ++i) {
      int const value = e < 2 ? 8 + 3 * i % 8 + (e == 1 && i == 0 ? 1 : 0) : (3 * i + e) % 8;
      weights.push_back(from_float<bf16>(static_cast<float>(value) / 64));
    }
  }
  int ties = 0;
  for (int t = 0; t < kMost; ++t) {
    for (int e = 0; e < kExperts; ++e) {
      float sum = 0;
      for (int i = 0; i < kHidden; ++i) {
        sum += to_float(rows[static_cast<std::size_t>(t * kHidden + i)]) * to_float(weights[static_cast<std::size_t>(e * kHidden + i)]);
      }
      auto const at = static_cast<std::size_t>(t * kExperts + e);
      exact[at] = sum;
      rounded[at] = to_float(from_float<bf16>(sum));
    }
    auto const first = static_cast<std::size_t>(t * kExperts);
    ASSERT_LT(exact[first], exact[first + 1]);
    ties += rounded[first] == rounded[first + 1] ? 1 : 0;
  }
  ASSERT_GE(ties, 2);
  Memory<Cuda>::copy_from_host(x.data(), rows.data(), rows.size() * sizeof(bf16));
  DeviceBuffer<bf16> const gate = upload(weights);

  struct Routed {
    std::vector<float> output, weights;
    std::vector<std::int32_t> ids;
    bool operator==(Routed const&) const = default;
  };
  auto const routed = [&](auto& runner, auto const& call) {
    Routed r{output_of(runner, kMost, call), std::vector<float>(kMost * kTopK), std::vector<std::int32_t>(kMost * kTopK)};
    Memory<Cuda>::copy_to_host(r.ids.data(), runner.topk_ids().data_handle(), r.ids.size() * sizeof(std::int32_t));
    Memory<Cuda>::copy_to_host(r.weights.data(), runner.topk_weights().data_handle(), r.weights.size() * sizeof(float));
    return r;
  };
  Runner<Layer, Plain> outside(self, store.view(), params<Runner<Layer, Plain>>(kMost));
  auto const given = [&](std::vector<float> const& values) {
    Memory<Cuda>::copy_from_host(logits.data(), values.data(), values.size() * sizeof(float));
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return routed(outside, [&](auto hidden, auto output) {
      outside.forward(hidden, make_rows(static_cast<float const*>(logits.data()), kMost, kExperts), output, {}, stream);
    });
  };
  auto const inside = [&]<class Parts>(Parts) {
    using R = Runner<Layer, Parts>;
    auto p = params<R>(kMost);
    p.gate.weight = make_rows(gate.data(), kExperts, kHidden);
    R runner(self, store.view(), p);
    return routed(runner, [&](auto hidden, auto output) { runner.forward(hidden, output, {}, stream); });
  };
  Routed const in_bf16 = given(rounded), in_float32 = given(exact);
  EXPECT_NE(in_bf16.ids, in_float32.ids) << "the data do not tell the two types apart";
  EXPECT_TRUE(inside(ModelGate{}) == in_bf16);
  EXPECT_TRUE(inside(Float32Gate{}) == in_float32);
}

}  // namespace
