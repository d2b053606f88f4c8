// SPDX-License-Identifier: Apache-2.0
// tests/gpu/runner_shared_experts_blocks_test.cpp: blocks on the device whose shared experts stay in the scheme in which the checkpoint
// stores them, against the block in the host space and the definition; and blocks whose shared experts are dense, with the reason.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include "loaded_block.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/comm/self.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/experts/reference.hpp"
#include "moe/experts/weights.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/models/load_runner_cuda.hpp"
#include "moe/models/load_runner_host.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_tensor.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"
#include "moe/quantization/none.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "moe/runner/description.hpp"
#include "on_hopper.hpp"
#include "packed_checkpoint.hpp"
#include "packed_definition.hpp"
#include "temporary_directory.hpp"

namespace {

using namespace moe;
using Cuda = space::cuda;
using Fp8 = quantization::Fp8Block<>;
using Int4 = quantization::Int4Group128;
using Int4Group32 = quantization::WNa16<4, 32>;
using Nvfp4 = quantization::Nvfp4W4A16;
using Mxfp4Fp8 = quantization::Mxfp4Fp8<>;
using moe_test::add_fp8_blocks;
using moe_test::CheckpointWriter;
using moe_test::definition;
using moe_test::forward;
using moe_test::json;
using moe_test::TemporaryDirectory;

template <class Quant, class Experts>
using Block = models::AnyDeviceBlock<Quant, backends::NoExpertParallel<Cuda>, Experts>;
template <class Quant, class Experts>
using SharedOf = typename models::DeviceSharedFor<Quant, Experts>::template Policy<bf16>;

// Which policy a block has is known when it is compiled.
template <class Experts, class Quant>
using StoredIn = runner::shared::Stored<Experts, bf16, Quant>;
using Dense = runner::shared::Dense<bf16>;
static_assert(std::is_same_v<SharedOf<Fp8, experts::HopperContiguous>, StoredIn<experts::HopperContiguous, Fp8>>);
static_assert(std::is_same_v<SharedOf<Fp8, experts::HopperMasked>, StoredIn<experts::HopperContiguous, Fp8>>);
static_assert(std::is_same_v<SharedOf<Int4, experts::HopperW4A16>, StoredIn<experts::HopperW4A16, Int4>>);
static_assert(std::is_same_v<SharedOf<Int4Group32, experts::HopperW4A16>, StoredIn<experts::HopperW4A16, Int4Group32>>);
static_assert(std::is_same_v<SharedOf<Nvfp4, experts::HopperW4A16>, StoredIn<experts::HopperW4A16, Nvfp4>>);
static_assert(std::is_same_v<SharedOf<Mxfp4Fp8, experts::HopperW4A8>, StoredIn<experts::HopperW4A8, Mxfp4Fp8>>);
static_assert(std::is_same_v<SharedOf<Fp8, experts::CudaReference>, Dense>);
static_assert(std::is_same_v<SharedOf<quantization::None, experts::HopperContiguous>, Dense>);
static_assert(std::is_same_v<SharedOf<quantization::Fp8PerTensor<>, experts::HopperContiguous>, Dense>);

constexpr std::int64_t kMost = 300;  // more than run on the side stream
constexpr moe_test::PackedSizes kSizes{.experts = 6, .hidden = 256, .intermediate = 128, .shared = 384};

std::vector<bf16> random_rows() {
  std::vector<bf16> x;
  for (float v : CheckpointWriter().normal({kMost, kSizes.hidden})) x.push_back(from_float<bf16>(v));
  return x;
}

class SharedOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!moe_test::on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
  template <class Write>
  void write(json const& quantization, Write const& write) {
    moe_test::write_checkpoint(directory_.path(), quantization, write, kSizes);
  }
  io::HostLayerWeights<float> numbers() const { return io::load_checkpoint_layer<float>(directory_.path(), 0); }
  template <class B>
  LoadedRunner<B> load(bool in_scheme = true) {
    return load_runner<B>(directory_.path(), 0, self_, {.max_tokens_per_rank = kMost, .shared_in_scheme = in_scheme});
  }
  /// rows of few and many tokens, on and off the side stream. A value between two codes may round the other way: among few rows it counts.
  template <class B>
  void expect_near(B& block, std::vector<float> const& want, double tolerance) {
    for (std::int64_t rows : {std::int64_t{1}, std::int64_t{9}, std::int64_t{64}, std::int64_t{256}, kMost}) {
      moe_test::expect_near(forward(block, x_.data(), rows), want.data(), rows, tolerance);
    }
  }
  /// With the fork and join of the side stream.
  template <class B>
  void expect_graph_of_bits(B& block) {
    moe_test::expect_graph_of_bits(self_, block, x_.data(), 9);
  }
  template <class B>
  void expect_choice(B& block, std::string const& choice) {
    EXPECT_EQ(block.runner().shared_choice(), choice);
    std::string lines;
    for (std::string const& line : runner::description(block.runner())) lines += line + '\n';
    EXPECT_NE(lines.find("shared experts: " + choice + '\n'), std::string::npos) << lines;
  }

  TemporaryDirectory directory_;
  comm::Self<Cuda> self_;
  std::vector<bf16> x_ = random_rows();
};

/// The host block with its shared experts in the scheme, too.
template <class Weight>
using HostSharedFp8 = runner::shared::Separate<experts::Reference<float>, Weight, Fp8>;
using HostBlock = Runner<
    ModularKernel<models::RuntimeLayer<float, float>, routing::AnyRouter, Fp8, backends::NoExpertParallel<>, experts::Reference<float>>,
    models::AnyParts<float, HostSharedFp8>>;

TEST_F(SharedOnGpu, Fp8BlocksOfTheFile) {
  write(moe_test::fp8_block_config(), add_fp8_blocks);
  auto block = load<Block<Fp8, experts::HopperContiguous>>();
  EXPECT_TRUE(block.direct());
  EXPECT_TRUE(block.shared_direct());
  expect_choice(block, "fp8_block128 with hopper_contiguous, the checkpoint's codes");

  comm::Self<> host_group;
  auto host = load_runner<HostBlock>(directory_.path(), 0, host_group, {.max_tokens_per_rank = kMost});
  std::vector<float> x, on_host(x_.size());
  for (bf16 v : x_) x.push_back(to_float(v));
  host.forward(make_rows(static_cast<float const*>(x.data()), kMost, kSizes.hidden), make_rows(on_host.data(), kMost, kSizes.hidden));
  expect_near(block, on_host, 1.2e-2);
  expect_near(block, definition<Fp8>(numbers(), x_, kMost), 1.2e-2);
}

TEST_F(SharedOnGpu, AGraphHasTheBitsOfACall) {
  write(moe_test::fp8_block_config(), add_fp8_blocks);
  auto block = load<Block<Fp8, experts::HopperContiguous>>();
  expect_graph_of_bits(block);
}

TEST_F(SharedOnGpu, TheSideStreamChangesNoBit) {
  using Shared = StoredIn<experts::HopperContiguous, Fp8>;
  constexpr std::int64_t kHidden = 256, kWidth = 384, kRows = 33;
  experts::WeightStore<runner::shared::ConfigOf<bf16, bf16>, Fp8, Cuda> store(1, kHidden, kWidth, true);
  CheckpointWriter random;
  std::vector<float> const w13 = random.normal({2 * kWidth, kHidden}), w2 = random.normal({kHidden, kWidth});
  store.set_expert(0, w13.data(), w2.data());
  Buffer<bf16, Cuda> x(kRows * kHidden);
  x.copy_from_host(x_.data());
  std::vector<std::vector<float>> outputs;
  for (std::int64_t const beside : {std::int64_t{0}, kRows}) {
    Shared::Params p;
    p.count = 1;
    p.intermediate = kWidth;
    p.stored = store.view();
    p.overlap_rows = beside;
    Arena<Cuda> arena;
    Shared::Part<Cuda, bf16> part(p, {kHidden, kHidden, kRows}, arena);
    EXPECT_TRUE(part.active());
    EXPECT_EQ(part.overlaps(kRows), beside > 0);
    EXPECT_FALSE(part.overlaps(kRows + 1));
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    CudaStream stream;
    part.run(make_rows(static_cast<bf16 const*>(x.data()), kRows, kHidden), {}, stream);
    Rows<bf16> const y = part.output();
    stream.synchronize();
    std::vector<bf16> out(static_cast<std::size_t>(kRows * kHidden));
    Memory<Cuda>::copy_to_host(out.data(), y.data_handle(), out.size() * sizeof(bf16));
    outputs.emplace_back();
    for (bf16 v : out) outputs.back().push_back(to_float(v));
  }
  EXPECT_EQ(outputs[0], outputs[1]);
  EXPECT_NE(outputs[0], std::vector<float>(outputs[0].size()));
}

/// The default threshold of Dense: 256 rows run on the side stream, 257 do not, and the bits are those without one (N6).
TEST_F(SharedOnGpu, N6_DenseUpToTheThreshold) {
  constexpr std::int64_t kThreshold = 256, kHidden = kSizes.hidden, kWidth = kSizes.shared;
  static_assert(kThreshold + 1 <= kMost);
  auto const device = [](std::vector<float> const& values) {
    std::vector<bf16> narrow;
    for (float v : values) narrow.push_back(from_float<bf16>(0.06F * v));
    Buffer<bf16, Cuda> out(static_cast<std::int64_t>(narrow.size()));
    out.copy_from_host(narrow.data());
    return out;
  };
  CheckpointWriter random;
  Buffer<bf16, Cuda> const w13 = device(random.normal({2 * kWidth, kHidden})), w2 = device(random.normal({kHidden, kWidth}));
  Buffer<bf16, Cuda> x(kMost * kHidden);
  x.copy_from_host(x_.data());
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  Dense::Params p;
  EXPECT_EQ(p.overlap_rows, kThreshold) << "by default";
  p.count = 1;
  p.intermediate = kWidth;
  p.activation = {activation::Kind::silu, {}};
  auto const set = [](auto& to, Buffer<bf16, Cuda> const& from, std::int64_t rows, std::int64_t cols) {
    to.codes = make_blocks(from.data(), 1, rows, cols);
    to.rows = rows;
    to.cols = cols;
  };
  set(p.weights.w13, w13, 2 * kWidth, kHidden);
  set(p.weights.w2, w2, kHidden, kWidth);
  CudaStream stream;
  auto const output_of = [&](std::int64_t overlap_rows, std::int64_t rows) {
    p.overlap_rows = overlap_rows;
    Arena<Cuda> arena;
    Dense::Part<Cuda, bf16> part(p, {kHidden, kHidden, kMost}, arena);
    EXPECT_EQ(part.overlaps(rows), overlap_rows > 0 && rows <= overlap_rows) << rows << " rows, threshold " << overlap_rows;
    EXPECT_EQ(part.overlaps(1), overlap_rows > 0);
    EXPECT_FALSE(part.overlaps(0));
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    part.run(make_rows(static_cast<bf16 const*>(x.data()), rows, kHidden), {}, stream);
    Rows<bf16> const y = part.output();
    stream.synchronize();
    std::vector<bf16> out(static_cast<std::size_t>(rows * kHidden));
    Memory<Cuda>::copy_to_host(out.data(), y.data_handle(), out.size() * sizeof(bf16));
    std::vector<float> values;
    for (bf16 v : out) values.push_back(to_float(v));
    return values;
  };
  for (std::int64_t const rows : {kThreshold - 1, kThreshold, kThreshold + 1}) {
    std::vector<float> const alone = output_of(0, rows);
    EXPECT_EQ(output_of(kThreshold, rows), alone) << rows << " rows";
    EXPECT_NE(alone, std::vector<float>(alone.size()));
  }
}

TEST_F(SharedOnGpu, DenseIfTheCallerWants) {
  write(moe_test::fp8_block_config(), add_fp8_blocks);
  auto block = load<Block<Fp8, experts::HopperContiguous>>(false);
  EXPECT_TRUE(block.direct());
  EXPECT_FALSE(block.shared_direct());
  expect_choice(block, "dense, unquantised: not asked for (shared_in_scheme)");
  expect_near(block, definition<Fp8, quantization::None>(numbers(), x_, kMost), 1.2e-2);
}

TEST_F(SharedOnGpu, DenseWhereTheCheckpointDoesNotQuantiseThem) {
  write(moe_test::fp8_block_config(), [](CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k) {
    if (base.find("shared_expert.") == std::string::npos) return add_fp8_blocks(w, base, n, k);
    std::vector<float> values = w.normal({n, k});
    for (float& v : values) v /= std::sqrt(static_cast<float>(k));
    w.file.add(base + ".weight", {n, k}, values);
  });
  auto block = load<Block<Fp8, experts::HopperContiguous>>();
  EXPECT_FALSE(block.shared_direct());
  expect_choice(block, "dense, unquantised: the checkpoint does not store them in fp8_block128");
  expect_near(block, definition<Fp8, quantization::None>(numbers(), x_, kMost), 1.2e-2);
}

/// A scheme of weights alone: rows stay bf16 in both ways.
TEST_F(SharedOnGpu, Int4OfTheFile) {
  write({{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 128}}, [](CheckpointWriter& w, std::string const& base, std::int64_t n,
                                                                         std::int64_t k) {
    moe_test::add_gptq(w, base, moe_test::random_integers(w, 4, n, k, 128, moe_test::Zeros::symmetric), moe_test::StoredZeros::minus_one);
  });
  auto block = load<Block<Int4, experts::HopperW4A16>>();
  EXPECT_TRUE(block.shared_direct());
  expect_choice(block, "int4_group128 with hopper_w4a16, the checkpoint's codes");
  auto const want = definition<quantization::None>(numbers(), x_, kMost);
  expect_near(block, want, 1.2e-2);
  auto dense = load<Block<Int4, experts::HopperW4A16>>(false);
  expect_near(dense, want, 1.2e-2);
}

/// As Kimi-K2-Thinking is stored.
TEST_F(SharedOnGpu, Int4InGroupsOf32OfTheFile) {
  write(moe_test::packed_integers_config(32), [](CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k) {
    moe_test::add_packed_integers(w, base, moe_test::random_integers(w, 4, n, k, 32, moe_test::Zeros::symmetric));
  });
  auto block = load<Block<Int4Group32, experts::HopperW4A16>>();
  EXPECT_TRUE(block.direct());
  expect_choice(block, "int4_group32 with hopper_w4a16, the checkpoint's codes");
  expect_near(block, definition<quantization::None>(numbers(), x_, kMost), 1.2e-2);
  expect_graph_of_bits(block);
}
TEST_F(SharedOnGpu, Nvfp4OfTheFile) {
  write(moe_test::nvfp4_config(),
        [](CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k) { moe_test::add_nvfp4(w, base, n, k); });
  auto block = load<Block<Nvfp4, experts::HopperW4A16>>();
  EXPECT_TRUE(block.direct());
  expect_choice(block, "nvfp4_w4a16 with hopper_w4a16, the checkpoint's codes");
  expect_near(block, definition<quantization::None>(numbers(), x_, kMost), 1.2e-2);
  expect_graph_of_bits(block);
}
/// Rows in e4m3, as those of fp8 blocks.
TEST_F(SharedOnGpu, Mxfp4UnderFp8RowsOfTheFile) {
  write(moe_test::mxfp4_config(), moe_test::add_mxfp4);
  auto block = load<Block<Mxfp4Fp8, experts::HopperW4A8>>();
  EXPECT_TRUE(block.direct());
  expect_choice(block, "mxfp4_fp8 with hopper_w4a8, the checkpoint's codes");
  expect_near(block, definition<Mxfp4Fp8>(numbers(), x_, kMost), 1.2e-2);
  expect_graph_of_bits(block);
  auto dense = load<Block<Mxfp4Fp8, experts::HopperW4A8>>(false);
  expect_near(dense, definition<Mxfp4Fp8, quantization::None>(numbers(), x_, kMost), 1.2e-2);
}

}  // namespace
