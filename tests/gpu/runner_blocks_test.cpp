// SPDX-License-Identifier: Apache-2.0
// tests/gpu/runner_blocks_test.cpp: every block file of the reference data as one graph on the device, from the hidden states to the
// block's output, against the expected output and against the block whose frame runs on the host.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "block_file.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/models/device_block.hpp"
#include "moe/quantization/none.hpp"
#include "moe/runner/device/captured_sizes.hpp"
#include "moe/runner/device/event_probe.hpp"

namespace {

using namespace moe;
using Local = backends::NoExpertParallel<space::cuda>;
using Cuda = space::cuda;
using moe_test::BlockFile;
using moe_test::each_block_file;
using moe_test::relative_error;

/// How the last block computed its gate, in words.
std::string last_gate;

/// The block's output on the device: enqueued, and the same bits replayed from a graph. in_place: it overwrites the input. change(weights):
/// of those that were read.
template <class Act, class Experts, class Change>
std::vector<float> run_on_device(BlockFile const& f, std::int64_t overlap_rows, bool in_place, Change const& change) {
  using Block = models::DeviceBlock<quantization::None, Local, Experts, Act>;
  std::int64_t const rows = f.rows();
  comm::Self<Cuda> self;
  auto weights = io::load_block<float>(f.store);
  change(weights);
  Block block(self, weights, ExpertPlacement(f.description.router.num_experts, 1), rows, {}, {}, {.shared_overlap_rows = overlap_rows});
  last_gate = block.runner().gate_choice();
  std::vector<Act> host(f.hidden.size());
  std::transform(f.hidden.begin(), f.hidden.end(), host.begin(), [](float v) { return from_float<Act>(v); });
  Buffer<Act, Cuda> x(static_cast<std::int64_t>(host.size())), y(x.size()), again(x.size());
  Buffer<std::int64_t, Cuda> tokens(static_cast<std::int64_t>(f.tokens.size()));
  x.copy_from_host(host.data());
  if (tokens.size() > 0) tokens.copy_from_host(f.tokens.data());
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  ForwardOptions options;
  options.token_ids = tokens.size() > 0 ? tokens.data() : nullptr;
  auto const forward = [&](Buffer<Act, Cuda>& to, std::int64_t n, cudaStream_t stream) {
    std::int64_t const h = f.description.hidden;
    Act const* const from = in_place ? to.data() : x.data();
    block.forward(make_rows(from, n, h), make_rows(to.data(), n, h), options, stream);
  };
  auto const bring = [&](Buffer<Act, Cuda>& to) {
    if (in_place) check_cuda(cudaMemcpy(to.data(), x.data(), x.bytes(), cudaMemcpyDeviceToDevice), "cudaMemcpy");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  };
  CudaStream stream;
  bring(y);
  forward(y, rows, stream);
  stream.synchronize();
  std::vector<Act> first(host.size()), replayed(host.size());
  y.copy_to_host(first.data());

  runner::CapturedSizes<Cuda> graphs;
  std::vector<std::int64_t> const sizes{rows};
  bring(again);
  graphs.capture(self, sizes, runner::capture_obstacle(block.runner()), [&](std::int64_t n, cudaStream_t s) { forward(again, n, s); });
  check_cuda(cudaMemset(again.data(), 0xff, again.bytes()), "cudaMemset");
  bring(again);
  graphs.replay(rows, stream);
  stream.synchronize();
  again.copy_to_host(replayed.data());
  std::vector<float> out;
  for (std::size_t i = 0; i < first.size(); ++i) {
    out.push_back(to_float(first[i]));
    if (to_float(replayed[i]) != out.back()) {
      ADD_FAILURE() << "a replayed graph differs at " << i << ": " << to_float(replayed[i]) << ", " << out.back();
      break;
    }
  }
  return out;
}

template <class Act, class Experts>
std::vector<float> run_on_device(BlockFile const& f, std::int64_t overlap_rows = 256, bool in_place = false) {
  return run_on_device<Act, Experts>(f, overlap_rows, in_place, [](auto const&) {});
}

TEST(RunnerBlocks, Float32EqualsExpected) {
  each_block_file([](BlockFile const& f) {
    auto const got = run_on_device<float, experts::CudaReference>(f);
    double largest = 0;
    for (float v : f.expected) largest = std::max(largest, std::abs(static_cast<double>(v)));
    for (std::size_t i = 0; i < got.size(); ++i) {  // the tolerance of the reference data
      ASSERT_NEAR(got[i], f.expected[i], 5e-6 * largest + 1e-5 * std::abs(f.expected[i])) << f.name << " at " << i;
    }
  });
}
/// The gate reads rows that are already bf16, so that a near tie may choose other experts than the reference's float32 rows do: the block
/// whose frame runs on the host gets the same rounded rows.
TEST(RunnerBlocks, Bf16EqualsTheFrameOnTheHost) {
  each_block_file([](BlockFile const& f) {
    BlockFile rounded(f.path);
    for (float& v : rounded.hidden) v = to_float(from_float<bf16>(v));
    auto const want = rounded.run<quantization::None, Local, experts::CudaReference>();
    auto const got = run_on_device<bf16, experts::CudaReference>(f);
    EXPECT_LT(relative_error(got, want), 1.2e-2) << f.name;
    EXPECT_LT(relative_error(got, f.expected), std::max(1.2e-2, 1.5 * relative_error(want, f.expected))) << f.name;
  });
}

/// Gates with values of bf16, as those of a checkpoint in bf16: the block no longer reads the float32 weights. Against the block whose gate
/// runs on the host, with the same weights and rows.
TEST(RunnerBlocks, GatesWithValuesOfBf16EqualTheFrameOnTheHost) {
  auto const round = [](std::vector<float>& values) {
    for (float& v : values) v = to_float(from_float<bf16>(v));
  };
  auto const change = [&](auto& weights) {
    round(weights.router_weight);
    round(weights.router_mlp.down);
  };
  int in_bf16 = 0, in_float32 = 0;
  each_block_file([&](BlockFile const& f) {
    BlockFile rounded(f.path);
    round(rounded.hidden);
    auto const want = rounded.run<quantization::None, Local, experts::CudaReference>(change);
    auto const got = run_on_device<bf16, experts::CudaReference>(f, 256, false, change);
    EXPECT_LT(relative_error(got, want), 1.2e-2) << f.name << ", " << last_gate;
    if (last_gate.starts_with("bf16 products")) ++in_bf16;
    if (last_gate.starts_with("float32 products")) ++in_float32;
    EXPECT_EQ(last_gate.find("is not a value of bf16"), std::string::npos) << f.name << ": " << last_gate;
  });
  std::printf("gates in bf16: %d, in float32: %d\n", in_bf16, in_float32);
  EXPECT_GT(in_bf16, 0);
}

// Beside the routed experts, one row above the threshold, and never: the same bits (N6). Also where the output is the input (N7).
TEST(RunnerBlocks, N6_N7_OverlapOfSharedExpertsKeepsTheBits) {
  int with_shared = 0;
  each_block_file([&](BlockFile const& f) {
    if (f.description.shared.count == 0) return;
    ++with_shared;
    auto const alone = run_on_device<bf16, experts::CudaReference>(f, 0);
    EXPECT_EQ((run_on_device<bf16, experts::CudaReference>(f, f.rows())), alone) << f.name;
    EXPECT_EQ((run_on_device<bf16, experts::CudaReference>(f, f.rows() - 1)), alone) << f.name;
    EXPECT_EQ((run_on_device<bf16, experts::CudaReference>(f, f.rows(), true)), alone) << f.name << ", in place";
    EXPECT_EQ((run_on_device<bf16, experts::CudaReference>(f, 0, true)), alone) << f.name << ", in place";
  });
  EXPECT_GE(with_shared, 3);
}

/// Q18: the reference experts multiply in float32, without the tensor cores.
TEST(RunnerBlocks, Q18_EmulationIsRefusedIfAsked) {
  using Block = models::DeviceBlock<quantization::None, Local, experts::CudaReference, float>;
  int blocks = 0;
  each_block_file([&](BlockFile const& f) {
    if (blocks++ > 0) return;
    comm::Self<Cuda> self;
    try {
      Block const block(self, io::load_block<float>(f.store), ExpertPlacement(f.description.router.num_experts, 1), f.rows(), {}, {},
                        {.refuse_emulation = true});
      FAIL() << "nothing was refused";
    } catch (Error const& e) {
      EXPECT_EQ(e.code(), ErrorCode::unsupported);
      EXPECT_EQ(std::string(e.what()), text("E_UNSUPPORTED: none activations, none weights, emulated on sm_", device_architecture(),
                                            " with cuda_reference; native execution was required"));
    }
  });
  EXPECT_GT(blocks, 0);
}

/// The stages that a block has, between events of the stream; a stage that threw is left out, and no forward is measured twice.
TEST(RunnerBlocks, EventsTimeEachStage) {
  using Block = models::DeviceBlock<quantization::None, Local, experts::CudaReference, float>;
  int with_shared = 0;
  each_block_file([&](BlockFile const& f) {
    if (f.description.shared.count == 0 || !f.tokens.empty()) return;
    ++with_shared;
    std::int64_t const rows = f.rows(), h = f.description.hidden;
    comm::Self<Cuda> self;
    Block block(self, io::load_block<float>(f.store), ExpertPlacement(f.description.router.num_experts, 1), rows, {}, {},
                {.shared_overlap_rows = 0});
    Buffer<float, Cuda> x(rows * h), y(x.size());
    x.copy_from_host(f.hidden.data());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    CudaStream stream;
    CudaEvent before, after;
    runner::EventProbe probe(stream);
    auto const forward = [&](std::int64_t n) {
      block.forward(make_rows(static_cast<float const*>(x.data()), n, h), make_rows(y.data(), n, h), {}, stream, probe);
    };
    forward(rows);
    probe.take();
    EXPECT_THROW(forward(rows + 1), Error);
    before.record(stream);
    forward(rows);
    after.record(stream);
    double const whole = 1e-3 * after.since(before);
    runner::EventProbe::Times const times = probe.take();
    double sum = 0;
    for (Phase const p : {Phase::route, Phase::experts, Phase::shared, Phase::finish}) {
      EXPECT_GT(times.phases[static_cast<std::size_t>(p)], 0) << f.name << ": " << name(p);
    }
    for (double const t : times.phases) sum += t;
    EXPECT_GE(times.total, 0.999 * sum) << f.name;  // stages do not overlap here
    EXPECT_LE(times.total, 1.001 * whole + 1e-6) << f.name;
    EXPECT_EQ(probe.take().total, 0) << f.name;
  });
  EXPECT_GE(with_shared, 3);
}

}  // namespace
