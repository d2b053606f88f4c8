// SPDX-License-Identifier: Apache-2.0
// tests/gpu/load_memory_blocks_test.cpp: load_runner() of experts with packed weights takes at most 1.1 times their packed bytes of device
// memory at any moment of loading and afterwards, besides the workspace and what surrounds the experts.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "loaded_block.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/comm/self.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/models/load_runner_cuda.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/int8_per_channel.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"
#include "on_hopper.hpp"
#include "packed_checkpoint.hpp"
#include "temporary_directory.hpp"

namespace {

using namespace moe;
using Cuda = space::cuda;
using moe_test::CheckpointWriter;
using moe_test::TemporaryDirectory;

/// 214 MB in four bits, so that ten of the driver's pieces of 2 MB are below the bound of 10 %.
constexpr moe_test::PackedSizes kSizes{.experts = 64, .hidden = 2048, .intermediate = 1024};
constexpr std::int64_t kTokens = 8;
constexpr std::int64_t kMostWorkspace = 50'000'000;  // 32 MiB of partial sums, and cuBLASLt's; a second copy of experts is 200 MB more

template <class Quant, class Experts>
using Block = models::AnyDeviceBlock<Quant, backends::NoExpertParallel<Cuda>, Experts>;

std::int64_t used_bytes() {
  std::size_t free = 0, total = 0;
  check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<std::int64_t>(total - free);
}

/// Writes a checkpoint of codes and scales, whose values do not matter.
template <class Quant, class Experts, class Write>
void expect_little_memory(moe_test::json const& quantization, Write const& write) {
  SCOPED_TRACE(text(Quant::kName, ", ", Experts::kName));
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(directory.path(), quantization, write, kSizes);
  comm::Self<Cuda> self;
  using B = Block<Quant, Experts>;
  using Store = experts::StoreFor<Experts, typename B::Layer::Config, Quant>;
  std::int64_t const packed = [] {
    Store const store(kSizes.experts, kSizes.hidden, kSizes.intermediate, true);
    return static_cast<std::int64_t>(store.bytes());
  }();
  std::vector<bf16> const x(static_cast<std::size_t>(kTokens * kSizes.hidden), from_float<bf16>(0.5F));
  {  // what the kernels' code and cuBLAS take stays from here on
    auto block = load_runner<B>(directory.path(), 0, self, {.max_tokens_per_rank = kTokens});
    EXPECT_TRUE(block.direct());
    moe_test::forward(block, x.data(), kTokens);
  }
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::int64_t const before = used_bytes();
  std::int64_t peak = 0;
  int samples = 0;
  auto block = load_runner<B>(directory.path(), 0, self, {.max_tokens_per_rank = kTokens, .progress = [&](std::int64_t, std::int64_t) {
                                                            peak = std::max(peak, used_bytes() - before);
                                                            ++samples;
                                                          }});
  auto const workspace = static_cast<std::int64_t>(block.runner().bytes());
  std::int64_t const after = used_bytes() - before;
  double const most = 1.1 * static_cast<double>(packed);
  std::printf("%s: %.1f MB packed, %.3f of it while loading, %.3f after it beside a workspace of %.1f MB\n", Quant::kName,
              static_cast<double>(packed) / 1e6, static_cast<double>(peak) / static_cast<double>(packed),
              static_cast<double>(after - workspace) / static_cast<double>(packed), static_cast<double>(workspace) / 1e6);
  EXPECT_LT(workspace, kMostWorkspace) << "no weights in it";
  EXPECT_GE(samples, kSizes.experts / 8);
  EXPECT_GE(static_cast<double>(peak), 0.9 * static_cast<double>(packed)) << "the samples see the experts";
  EXPECT_LE(static_cast<double>(peak), most);
  // The gate and the router are less than a megabyte; the driver gives memory out in pieces of two.
  EXPECT_LE(static_cast<double>(after - workspace), most + 4e6);
  moe_test::forward(block, x.data(), kTokens);
}

class LoadMemory : public testing::Test {
 protected:
  void SetUp() override {
    if (!moe_test::on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
};

TEST_F(LoadMemory, Mxfp4) {
  auto const write = [](CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k) {
    moe_test::add_mxfp4(w, base, n, k);
  };
  expect_little_memory<quantization::Mxfp4W4A16<>, experts::HopperW4A16>(moe_test::mxfp4_config(), write);
  expect_little_memory<quantization::Mxfp4Fp8<>, experts::HopperW4A8>(moe_test::mxfp4_config(), write);
}
/// As Kimi-K2-Thinking is stored.
TEST_F(LoadMemory, Int4InGroupsOf32) {
  expect_little_memory<quantization::WNa16<4, 32>, experts::HopperW4A16>(
      moe_test::packed_integers_config(32), [](CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k) {
        w.codes(base + ".weight_packed", io::FileDType::i32, {n, k / 8});
        w.file.add(base + ".weight_scale", {n, k / 32},
                   std::vector<bf16>(static_cast<std::size_t>(n * k / 32), from_float<bf16>(0.0078125F)));
        w.file.add(base + ".weight_shape", {2}, std::vector<std::int64_t>{n, k});
      });
}
TEST_F(LoadMemory, Int8) {
  expect_little_memory<quantization::Int8PerChannel, experts::HopperW8A16>(
      moe_test::compressed_config("int-quantized", {{"num_bits", 8}, {"type", "int"}, {"strategy", "channel"}}),
      [](CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k) {
        w.codes(base + ".weight", io::FileDType::i8, {n, k});
        w.scales(base + ".weight_scale", {n, 1});
      });
}

}  // namespace
