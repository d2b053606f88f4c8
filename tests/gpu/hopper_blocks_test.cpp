// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_blocks_test.cpp: every block file of the reference data through the Hopper experts: in bf16 against the expected output,
// in fp8 against the device oracle with the same quantisation. fp8 blocks need an intermediate of whole 128, which none has.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <string>
#include <vector>

#include "batched_exchange.hpp"
#include "golden_dir.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/experts/hopper_experts.hpp"
#include "moe/models/block.hpp"
#include "moe/quantization/fp8_per_tensor.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/none.hpp"

namespace {

using namespace moe;
using Local = backends::NoExpertParallel<space::cuda>;

template <class T>
std::vector<T> read(io::TensorStore const& store, std::string const& name) {
  io::StoredTensor const t = store.at(name);
  return t.file->read<T>(*t.info);
}

double relative_error(std::vector<float> const& got, std::vector<float> const& want) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    error += std::pow(static_cast<double>(got[i]) - want[i], 2);
    norm += std::pow(static_cast<double>(want[i]), 2);
  }
  return std::sqrt(error / norm);
}

struct File {
  std::string name;
  io::TensorStore store;
  std::vector<float> hidden, expected;
  std::vector<std::int64_t> tokens;
  io::LayerDescription description;

  explicit File(std::filesystem::path const& path) : name(path.stem().string()), store(path) {
    hidden = read<float>(store, "hidden");
    expected = read<float>(store, "expected");
    if (store.contains("input_ids")) tokens = read<std::int64_t>(store, "input_ids");
    description = io::from_block_metadata(store.metadata(), store.label());
  }
  std::int64_t rows() const { return static_cast<std::int64_t>(hidden.size()) / description.hidden; }

  template <class Quant, class Backend, class Experts>
  std::vector<float> run() const {
    using Block = models::Block<Quant, Backend, Experts, bf16, bf16, float>;
    typename Backend::Comm comm;
    Block block(comm, io::load_block<float>(store), ExpertPlacement(description.router.num_experts, 1), rows());
    std::vector<float> out(hidden.size());
    block.forward(hidden, tokens.empty() ? nullptr : tokens.data(), out);
    return out;
  }
};

class HopperBlocks : public testing::Test {
 protected:
  void SetUp() override {
    int major = 0;
    if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) != cudaSuccess || major != 9) {
      GTEST_SKIP() << "needs compute capability 9.0";
    }
  }
  /// Calls test(file) for every block file; returns how many there are.
  template <class Test>
  static int each(Test test) {
    int count = 0;
    for (auto const& entry : std::filesystem::directory_iterator(moe_test::golden_dir() / "moe_blocks")) {
      if (entry.path().extension() != ".safetensors") continue;
      SCOPED_TRACE(entry.path().filename().string());
      try {
        test(File(entry.path()));
      } catch (Error const& e) {
        ADD_FAILURE() << e.what();
      }
      ++count;
    }
    EXPECT_GT(count, 0);
    return count;
  }
  template <class Quant>
  static void equals_oracle() {
    int fit = 0;
    int const all = each([&](File const& f) {
      if (f.description.intermediate % 16 != 0 || f.description.expert_hidden() % 16 != 0) return;
      ++fit;
      auto const want = f.run<Quant, Local, experts::CudaReference>();
      // Few rows of few values: one code of the intermediate that rounds the other way is a large part.
      EXPECT_LT(relative_error(f.run<Quant, Local, experts::HopperContiguous>(), want), 3e-2);
    });
    EXPECT_GE(10 * fit, 8 * all) << "only widths that are no multiples of 16 do not fit";
  }
};

TEST_F(HopperBlocks, Bf16EqualsExpected) {
  each([](File const& f) { EXPECT_LT(relative_error(f.run<quantization::None, Local, experts::HopperContiguous>(), f.expected), 1e-2); });
}
TEST_F(HopperBlocks, Bf16BatchedEqualsExpected) {
  each([](File const& f) {
    if (f.description.weight_on == io::WeightOn::expert_input) return;  // a batch has no weights; a backend would apply them on the way
    EXPECT_LT(relative_error(f.run<quantization::None, moe_test::LocalBatches, experts::HopperMasked>(), f.expected), 1e-2);
  });
}
TEST_F(HopperBlocks, Bf16EqualsOracle) {
  each([](File const& f) {
    auto const want = f.run<quantization::None, Local, experts::CudaReference>();
    EXPECT_LT(relative_error(f.run<quantization::None, Local, experts::HopperContiguous>(), want), 5e-3);
  });
}
TEST_F(HopperBlocks, Fp8PerTokenEqualsOracle) { equals_oracle<quantization::Fp8PerToken<>>(); }
TEST_F(HopperBlocks, Fp8PerTensorEqualsOracle) { equals_oracle<quantization::Fp8PerTensor<>>(); }

}  // namespace
