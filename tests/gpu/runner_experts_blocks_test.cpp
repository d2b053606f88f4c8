// SPDX-License-Identifier: Apache-2.0
// tests/gpu/runner_experts_blocks_test.cpp: every family's block with the best experts for its scheme, on the device from its input to its
// output: unquantised, in fp8 and with 4- and 8-bit weights, under rows of 8 bits too, against the block in the host space.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "block_file.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/experts/reference.hpp"
#include "moe/models/device_experts.hpp"
#include "moe/models/fused_shared.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int4_fp8.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/int8_per_channel.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"
#include "moe/quantization/none.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "moe/runner/shared_experts.hpp"
#include "widened_block.hpp"

namespace {

using namespace moe;
using Cuda = space::cuda;
using Local = backends::NoExpertParallel<Cuda>;
using moe_test::BlockFile;
using moe_test::each_block_file;
using moe_test::host_output;
using moe_test::Numbers;
using moe_test::relative_error;
using moe_test::Weights;
using moe_test::widened;
using Fp8Block = quantization::Fp8Block<>;
using Fp8Token = quantization::Fp8PerToken<>;
using Mxfp4 = quantization::Mxfp4W4A16<>;
using Mxfp4Fp8 = quantization::Mxfp4Fp8<>;
using Nvfp4 = quantization::Nvfp4W4A16;
using Int4 = quantization::Int4Group128;
using Int4Group32 = quantization::WNa16<4, 32>;  // Kimi-K2-Thinking
using Int4Fp8 = quantization::Int4Fp8<128>;
using Int4Group32Fp8 = quantization::Int4Fp8<32>;
using Int8Weights = quantization::Int8PerChannel;

struct OnDevice {
  std::vector<float> output;
  std::string experts, note;
};
/// Enqueued, and the same bits replayed from a graph.
template <class Quant>
OnDevice run_on_device(Weights const& weights, std::vector<float> const& hidden, std::vector<std::int64_t> const& tokens) {
  std::int64_t const width = weights.description.hidden, rows = static_cast<std::int64_t>(hidden.size()) / width;
  comm::Self<Cuda> self;
  models::BestDeviceBlock<Quant, Local> block(self, weights, ExpertPlacement(static_cast<int>(weights.experts.size()), 1), rows);
  std::string obstacle;
  block.visit([&](auto& b) { obstacle = runner::capture_obstacle(b.runner()); });
  return {moe_test::device_output(self, block, obstacle, width, hidden, tokens), block.experts(), block.note()};
}

bool hopper() { return device_architecture() == 90; }

/// Families that must be among those that ran.
void expect_families(std::set<std::string> const& names, std::vector<std::string> const& wanted) {
  for (std::string const& family : wanted) {
    auto const of_family = [&](std::string const& name) { return name.rfind(family, 0) == 0; };
    EXPECT_TRUE(std::any_of(names.begin(), names.end(), of_family)) << family;
  }
}

/// The experts that a scheme should have on Hopper.
template <class Quant>
constexpr char const* best_experts() {
  if (std::is_same_v<Quant, Mxfp4Fp8> || std::is_same_v<Quant, Int4Fp8> || std::is_same_v<Quant, Int4Group32Fp8>) return "hopper_w4a8";
  if (std::is_same_v<Quant, Int8Weights>) return "hopper_w8a16";
  constexpr bool kFourBits = Quant::kWeightPack == 2;
  return kFourBits ? "hopper_w4a16" : "hopper_contiguous";
}

/// Each family in sizes that the Hopper kernels take. tolerance: relative, of the whole output.
template <class Quant>
void widened_blocks_equal_the_host(double tolerance) {
  std::set<std::string> ran;
  int with_fused = 0;
  each_block_file([&](BlockFile const& f) {
    Weights const weights = widened(io::load_block<float>(f.store), f.name);
    io::LayerDescription const& d = weights.description;
    std::vector<float> hidden;
    Numbers(f.name + " rows").fill(hidden, f.rows() * d.hidden, 1.0);
    OnDevice const got = run_on_device<Quant>(weights, hidden, f.tokens);
    EXPECT_LT(relative_error(got.output, host_output<Quant>(weights, hidden, f.tokens)), tolerance) << got.experts << ": " << got.note;
    bool const best = hopper() && !d.expert_norm;
    EXPECT_EQ(got.experts, best ? best_experts<Quant>() : "cuda_reference") << got.note;
    EXPECT_EQ(got.note.empty(), best) << got.note;
    ran.insert(f.name);
    if (!models::fusing_obstacle(weights).empty()) return;

    Weights const fused = models::with_fused_shared(weights);
    OnDevice const one_kernel = run_on_device<Quant>(fused, hidden, f.tokens);
    EXPECT_LT(relative_error(one_kernel.output, host_output<Quant>(fused, hidden, f.tokens)), tolerance) << "fused: " << one_kernel.experts;
    EXPECT_EQ(one_kernel.experts, got.experts);
    ++with_fused;
  });
  EXPECT_GE(with_fused, 2);
  expect_families(ran, {"deepseek_v3", "qwen3_moe", "gpt_oss", "mixtral", "aria"});
  if (std::getenv("MOE_GOLDEN_DIR") == nullptr) return;  // the selection in tests/data has no more of them
  expect_families(ran, {"llama4", "glm4_moe", "nemotron_h_latent", "longcat_flash"});
}

TEST(RunnerExperts, Bf16) { widened_blocks_equal_the_host<quantization::None>(1.2e-2); }
// One code of an intermediate value that rounds to the other side is an error of 1/16 of it.
TEST(RunnerExperts, Fp8Block) { widened_blocks_equal_the_host<Fp8Block>(4e-2); }
TEST(RunnerExperts, Fp8PerToken) { widened_blocks_equal_the_host<Fp8Token>(4e-2); }
TEST(RunnerExperts, Mxfp4) { widened_blocks_equal_the_host<Mxfp4>(1.5e-2); }
TEST(RunnerExperts, Int4) { widened_blocks_equal_the_host<Int4>(1.5e-2); }
TEST(RunnerExperts, Nvfp4) { widened_blocks_equal_the_host<Nvfp4>(1.5e-2); }
TEST(RunnerExperts, Int4Group32) { widened_blocks_equal_the_host<Int4Group32>(1.5e-2); }
// Rows and intermediate as those of Fp8Block, and so the tolerance.
TEST(RunnerExperts, Mxfp4UnderFp8Rows) { widened_blocks_equal_the_host<Mxfp4Fp8>(4e-2); }
TEST(RunnerExperts, Int4UnderFp8Rows) { widened_blocks_equal_the_host<Int4Fp8>(4e-2); }
TEST(RunnerExperts, Int4Group32UnderFp8Rows) { widened_blocks_equal_the_host<Int4Group32Fp8>(4e-2); }
TEST(RunnerExperts, Int8Weights) { widened_blocks_equal_the_host<Int8Weights>(1.5e-2); }

/// The block files themselves, in sizes that some kernels do not take.
TEST(RunnerExperts, FilesOfAnySize) {
  int fast = 0, slow = 0;
  each_block_file([&](BlockFile const& f) {
    BlockFile rounded(f.path);
    for (float& v : rounded.hidden) v = to_float(from_float<bf16>(v));
    std::int64_t const h = f.description.expert_hidden(), inner = f.description.intermediate;
    auto const check = [&](auto quant, int multiple, double tolerance) {
      using Quant = decltype(quant);
      auto const want = rounded.run<Quant, backends::NoExpertParallel<>, experts::Reference<float>, float>();
      OnDevice const got = run_on_device<Quant>(io::load_block<float>(f.store), f.hidden, f.tokens);
      EXPECT_LT(relative_error(got.output, want), tolerance) << got.experts << ": " << got.note;
      bool const normed = f.description.expert_norm, sized = h % multiple == 0 && inner % multiple == 0;
      bool const fits = hopper() && sized && !normed;
      EXPECT_EQ(got.experts, fits ? "hopper_contiguous" : "cuda_reference") << got.note;
      ++(fits ? fast : slow);
      if (hopper() && !fits) {
        std::string const why = sized ? "no norm of an expert's output" : text("is not a multiple of ", multiple);
        EXPECT_NE(got.note.find(why), std::string::npos) << got.note;
      }
    };
    check(quantization::None{}, 8, 1.2e-2);
    check(Fp8Token{}, 16, 6e-2);
  });
  EXPECT_GT(slow, 0);
  if (hopper()) {
    EXPECT_GT(fast, slow);
  }
}

/// Shared experts in a scheme of their own, beside a layer.
template <class Experts, class Quant>
void shared_experts_equal_the_host(double tolerance) {
  if (!hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  constexpr int kRows = 9, kHidden = 256, kWidth = 128, kShared = 2;
  using OnHost = runner::shared::Separate<experts::Reference<float>, float, Quant>;
  using OnGpu = runner::shared::Separate<Experts, bf16, Quant>;
  using HostPart = typename OnHost::template Part<space::host, float>;
  using GpuPart = typename OnGpu::template Part<Cuda, bf16>;
  experts::WeightStore<typename HostPart::LayerConfig, Quant> host_store(kShared, kHidden, kWidth, true);
  experts::WeightStore<typename GpuPart::LayerConfig, Quant, Cuda> gpu_store(kShared, kHidden, kWidth, true);
  Numbers numbers("shared");
  for (int e = 0; e < kShared; ++e) {
    std::vector<float> w13, w2;
    numbers.fill(w13, 2 * kWidth * kHidden, 0.2);
    numbers.fill(w2, kHidden * kWidth, 0.3);
    host_store.set_expert(e, w13.data(), w2.data());
    gpu_store.set_expert(e, w13.data(), w2.data());
  }
  auto const params = [&](auto p, auto const& store) {
    p.count = kShared;
    p.intermediate = kWidth;
    p.weights = store.view();
    return p;
  };
  runner::Sizes const sizes{kHidden, kHidden, kRows};
  std::vector<float> x;
  numbers.fill(x, kRows * kHidden, 1.0);
  Arena<space::host> host_arena;
  HostPart host(params(typename OnHost::Params{}, host_store), sizes, host_arena);
  host.run(make_rows(static_cast<float const*>(x.data()), kRows, kHidden), {}, {});
  std::vector<float> const want(host.output().data_handle(), host.output().data_handle() + kRows * kHidden);

  std::vector<bf16> narrow(x.size());
  std::transform(x.begin(), x.end(), narrow.begin(), [](float v) { return from_float<bf16>(v); });
  Buffer<bf16, Cuda> rows(kRows * kHidden);
  rows.copy_from_host(narrow.data());
  Arena<Cuda> arena;
  GpuPart gpu(params(typename OnGpu::Params{}, gpu_store), sizes, arena);
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  CudaStream stream;
  gpu.run(make_rows(static_cast<bf16 const*>(rows.data()), kRows, kHidden), {}, stream);
  stream.synchronize();
  Memory<Cuda>::copy_to_host(narrow.data(), gpu.output().data_handle(), narrow.size() * sizeof(bf16));
  std::vector<float> got(narrow.size());
  std::transform(narrow.begin(), narrow.end(), got.begin(), [](bf16 v) { return to_float(v); });
  EXPECT_LT(relative_error(got, want), tolerance);
}
TEST(RunnerSharedExperts, Bf16) { shared_experts_equal_the_host<experts::HopperContiguous, quantization::None>(1e-2); }
TEST(RunnerSharedExperts, Fp8Block) { shared_experts_equal_the_host<experts::HopperContiguous, Fp8Block>(4e-2); }
TEST(RunnerSharedExperts, Fp8PerToken) { shared_experts_equal_the_host<experts::HopperContiguous, Fp8Token>(4e-2); }
TEST(RunnerSharedExperts, Mxfp4) { shared_experts_equal_the_host<experts::HopperW4A16, Mxfp4>(1.5e-2); }
TEST(RunnerSharedExperts, Int8Weights) { shared_experts_equal_the_host<experts::HopperW8A16, Int8Weights>(1.5e-2); }
TEST(RunnerSharedExperts, Int4) { shared_experts_equal_the_host<experts::HopperW4A16, Int4>(1.5e-2); }
TEST(RunnerSharedExperts, Nvfp4) { shared_experts_equal_the_host<experts::HopperW4A16, Nvfp4>(1.5e-2); }
TEST(RunnerSharedExperts, Int4Group32) { shared_experts_equal_the_host<experts::HopperW4A16, Int4Group32>(1.5e-2); }
TEST(RunnerSharedExperts, Mxfp4UnderFp8Rows) { shared_experts_equal_the_host<experts::HopperW4A8, Mxfp4Fp8>(4e-2); }
TEST(RunnerSharedExperts, Int4UnderFp8Rows) { shared_experts_equal_the_host<experts::HopperW4A8, Int4Fp8>(4e-2); }
TEST(RunnerSharedExperts, Int4Group32UnderFp8Rows) { shared_experts_equal_the_host<experts::HopperW4A8, Int4Group32Fp8>(4e-2); }

}  // namespace
