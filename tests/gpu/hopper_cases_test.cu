// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_cases_test.cu: numbered cases of docs/semantics/experts.md that the Hopper experts' other tests do not cover: the order
// of the slots, shapes of all sizes, partial experts that are summed, and calls that must be refused before anything is launched.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "hopper_composition.cuh"
#include "hopper_reference.cuh"
#include "moe/core/cuda_space.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/none.hpp"

namespace {

using namespace moe::hopper;
using namespace moe_test;
using Sizes = moe::hopper::LocalShape;

class HopperCases : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
  static std::vector<char> run(Problem const& problem, ContiguousLayer const& layer, TypedMemory<char> const& workspace,
                               Tuning const* tuning = nullptr) {
    TypedMemory<char> const out(static_cast<std::size_t>(problem.tokens) * problem.shape.hidden * 2);
    workspace.fill_bytes(0xFF);
    out.fill_bytes(0xFF);
    if (tuning != nullptr) {
      layer.forward(problem.call(out.data()), *tuning, workspace.data(), nullptr);
    } else {
      layer.forward(problem.call(out.data()), workspace.data(), nullptr);
    }
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return out.download();
  }
  static TypedMemory<char> workspace_for(ContiguousLayer const& layer, int tokens) {
    return TypedMemory<char>(static_cast<std::size_t>(layer.workspace_bytes(tokens)));
  }
};

TEST_F(HopperCases, X1_SlotsAreSortedByExpertAndStable) {
  Sizes const shape{3, 256, 128, 2};
  Problem const problem(shape, Scheme::bf16, 4, Pattern::random, 1);
  problem.ids.upload({2, 0, 1, 2, 2, 0, -1, 2});
  ContiguousLayer const layer(shape, Scheme::bf16, problem.layer_weights());
  TypedMemory<char> const workspace = workspace_for(layer, 4);
  std::vector<float> const weights = problem.weights.download();
  for (bool self_align : {true, false}) {
    Tuning tuning = choose_tuning(shape, Scheme::bf16, 4);
    tuning.self_align = self_align;
    run(problem, layer, workspace, &tuning);
    struct Row {
      int slot;
      float weight;
    };
    std::vector<Row> rows(7);
    ASSERT_EQ(cudaMemcpy(rows.data(), workspace.data() + plan_workspace(shape, Scheme::bf16, 4, 8).sorted_rows, sizeof(Row) * rows.size(),
                         cudaMemcpyDeviceToHost),
              cudaSuccess);
    std::vector<int> const wanted{1, 5, 2, 0, 3, 4, 7};
    for (std::size_t i = 0; i < rows.size(); ++i) {
      EXPECT_EQ(rows[i].slot, wanted[i]) << "place " << i << (self_align ? ", sorted by the layer kernel" : "");
      EXPECT_EQ(rows[i].weight, weights[static_cast<std::size_t>(wanted[i])]);
    }
  }
}

TEST_F(HopperCases, X3_ShapesOfAllSizes) {
  std::uint64_t seed = 300;
  struct Case {
    Sizes shape;
    std::vector<int> tokens;
  };
  for (auto const& [shape, counts] :
       {Case{{8, 128, 128, 1}, {1, 2, 33, 4096}}, Case{{64, 128, 128, 6}, {64, 222}}, Case{{8, 2048, 1024, 2}, {1, 128}},
        Case{{256, 2048, 1024, 8}, {2, 222}}, Case{{8, 7168, 2048, 6}, {33}}, Case{{64, 7168, 2048, 8}, {1, 1024}}}) {
    for (Scheme scheme : {Scheme::bf16, Scheme::fp8_block, Scheme::fp8_row, Scheme::int8_row}) {
      for (int tokens : counts) {
        Problem const problem(shape, scheme, tokens, Pattern::random, ++seed);
        ContiguousLayer const layer(shape, scheme, problem.layer_weights());
        std::vector<char> const out = run(problem, layer, workspace_for(layer, tokens));
        TypedMemory<char> const device(out.size());
        device.upload(out);
        EXPECT_LT(compare(problem, device.data(), 32).relative, tolerance(scheme, tokens))
            << name(scheme) << ", E " << shape.num_experts << " H " << shape.hidden << " I " << shape.intermediate << " k " << shape.topk
            << ", " << tokens << " tokens";
      }
    }
  }
}

TEST_F(HopperCases, X5_ScalesOfEverySizeInTilesOf128Rows) {
  Sizes const shape{4, 1024, 256, 1};
  constexpr int kTokens = 600, kKinds = 9, kBlocks = 1024 / 128;
  Features features;
  features.quantized_x = true;
  Problem const problem(shape, Scheme::fp8_block, kTokens, Pattern::random, 600, features);
  std::vector<float> scales = problem.x_scales.download();
  std::vector<char> codes = problem.x.download();
  for (int t = 0; t < kTokens; ++t) {
    float* const row = scales.data() + t * kBlocks;
    for (int b = 0; b < kBlocks; ++b) {
      switch (t % kKinds) {
        case 1: row[b] = b % 3 == 0 ? 0.0F : row[b]; break;  // zero scales of codes that are not zero, the first among them
        case 2: row[b] = std::ldexp(row[b], b % 2 == 0 ? 20 : -20); break;
        case 3: row[b] = std::ldexp(row[b], -8 * b); break;  // falls by 2^56
        case 4: row[b] = std::ldexp(row[b], 8 * (b - kBlocks + 1)); break;
        case 5: row[b] = std::ldexp(row[b], b == 2 ? 0 : -100); break;  // one block of 2^100 times the others' scale
        case 6: row[b] = 0.0F; break;
        case 7:  // zero codes under the largest scale
          if (b == 3) {
            row[b] = 1e9F;
            std::fill_n(codes.begin() + t * 1024 + 128 * b, 128, char{0});
          }
          break;
        case 8: row[b] = b == 5 ? std::numeric_limits<float>::quiet_NaN() : row[b]; break;
        default: break;
      }
    }
  }
  problem.x_scales.upload(scales);
  problem.x.upload(codes);
  std::vector<float> w13 = problem.w13_scales.download();
  w13[0] = w13[9] = 0.0F;  // expert 0: the first block of K of gate rows 0 to 127, the second of rows 128 to 255
  problem.w13_scales.upload(w13);
  EXPECT_EQ(choose_tuning(shape, Scheme::fp8_block, kTokens, false).tile_rows, kBlockRows);
  ContiguousLayer const layer(shape, Scheme::fp8_block, problem.layer_weights());
  std::vector<char> const out = run(problem, layer, workspace_for(layer, kTokens));
  TypedMemory<char> const device(out.size());
  device.upload(out);
  std::vector<std::vector<int>> of_kind(kKinds);
  for (int t = 0; t < kTokens; ++t) of_kind[static_cast<std::size_t>(t % kKinds)].push_back(t);
  for (int kind = 0; kind < 8; ++kind) {
    Difference const d = compare(problem, device.data(), of_kind[static_cast<std::size_t>(kind)]);
    EXPECT_LT(d.relative, kind == 6 ? 1e-20 : 2e-2) << "scales of kind " << kind;
  }
  for (int t : of_kind[8]) {
    std::uint16_t bits;
    std::memcpy(&bits, out.data() + t * 2048, 2);
    EXPECT_GT(bits & 0x7FFF, 0x7F80) << "token " << t << " has a NaN among its scales, which its output lacks";
  }
}

TEST_F(HopperCases, X9_HalvesOfTheIntermediateSumToTheWholeWithTheBiasOnce) {
  constexpr int kExperts = 4, kHidden = 256, kInter = 256, kTokens = 100, kHalf = kInter / 2;
  Features features;
  features.bias = true;
  features.options.activation = moe::activation::Kind::swigluoai_halves;
  features.options.constants.limit = 7.0F;
  Problem const whole({kExperts, kHidden, kInter, 2}, Scheme::bf16, kTokens, Pattern::random, 41, features);
  auto const launcher = layer_launcher<Scheme::bf16, AnyActivation>();
  ContiguousLayer const layer(whole.shape, Scheme::bf16, whole.layer_weights(), features.options, launcher);
  std::vector<char> const sum_of_all = run(whole, layer, workspace_for(layer, kTokens));
  std::vector<std::vector<char>> parts;
  for (int half = 0; half < 2; ++half) {
    Problem part({kExperts, kHidden, kHalf, 2}, Scheme::bf16, kTokens, Pattern::random, 41, features);
    auto const copy = [](void* to, std::size_t to_pitch, void const* from, std::size_t from_pitch, std::size_t width, std::size_t rows) {
      ASSERT_EQ(cudaMemcpy2D(to, to_pitch, from, from_pitch, width, rows, cudaMemcpyDeviceToDevice), cudaSuccess);
    };
    std::size_t const block13 = std::size_t{kHalf} * kHidden * 2;  // gate or up rows of an expert's half
    copy(part.w13.data(), block13, whole.w13.data() + half * block13, 2 * block13, block13, 2 * kExperts);
    copy(part.w13_bias.data(), kHalf * 4, whole.w13_bias.data() + half * kHalf, kInter * 4, kHalf * 4, 2 * kExperts);
    copy(part.w2.data(), kHalf * 2, whole.w2.data() + half * kHalf * 2, kInter * 2, kHalf * 2, kExperts * kHidden);
    copy(part.w2_bias.data(), part.w2_bias.bytes(), whole.w2_bias.data(), part.w2_bias.bytes(), part.w2_bias.bytes(), 1);
    copy(part.x.data(), part.x.bytes(), whole.x.data(), part.x.bytes(), part.x.bytes(), 1);
    copy(part.weights.data(), part.weights.bytes(), whole.weights.data(), part.weights.bytes(), part.weights.bytes(), 1);
    copy(part.ids.data(), part.ids.bytes(), whole.ids.data(), part.ids.bytes(), part.ids.bytes(), 1);
    LayerWeights weights = part.layer_weights();
    if (half == 1) weights.w2_bias = nullptr;
    ContiguousLayer const half_layer(part.shape, Scheme::bf16, weights, features.options, launcher);
    parts.push_back(run(part, half_layer, workspace_for(half_layer, kTokens)));
  }
  auto const floats = [](std::vector<char> const& bytes) {
    std::vector<float> out;
    for (std::size_t i = 0; i < bytes.size(); i += 2) {
      std::uint16_t bits;
      std::memcpy(&bits, bytes.data() + i, 2);
      std::uint32_t const wide = std::uint32_t{bits} << 16;
      float value;
      std::memcpy(&value, &wide, 4);
      out.push_back(value);
    }
    return out;
  };
  std::vector<float> sum = floats(parts[0]);
  std::vector<float> const second = floats(parts[1]);
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += second[i];
  EXPECT_LT(relative_error(sum, floats(sum_of_all)), 5e-3);
}

std::string refusal(auto&& call) {
  try {
    call();
  } catch (moe::Error const& e) {
    return e.what();
  }
  return "";
}

TEST_F(HopperCases, X12_WrongShapesAndAddressesAreRefusedBeforeALaunch) {
  using Config = CompositionConfig<moe::bf16, moe::activation::Silu>;
  using Quant = moe::quantization::None;
  using moe::make_blocks;
  using moe::make_rows;
  using Standard = moe::experts::HopperContiguous::Kernel<Config, Quant, moe::ActivationFormat::standard>;
  using Batched = moe::experts::HopperMasked::Kernel<Config, Quant, moe::ActivationFormat::batched>;
  constexpr int kExperts = 4, kHidden = 128, kInter = 64, kRows = 10, kTopK = 2;
  moe::experts::WeightStore<Config, Quant, moe::space::cuda> const store(kExperts, kHidden, kInter, true);
  moe::Shape<Config> const shape({kHidden, kInter, kExperts, kTopK, false});
  moe::Arena<moe::space::cuda> arena;
  auto make = [&](auto weights) { return Standard(shape, weights, kRows, Quant{}, {}, {}, arena); };
  auto wrong = store.view();
  wrong.w2.rows = 96;
  EXPECT_NE(refusal([&] { make(wrong); }).find("w2 rows is 96, expected 128"), std::string::npos);
  wrong = store.view();
  wrong.w13.cols = 96;
  EXPECT_NE(refusal([&] { make(wrong); }).find("w13 columns is 96, expected 128"), std::string::npos);

  Standard const kernel = make(store.view());
  moe::Buffer<moe::bf16, moe::space::cuda> x(kRows * kHidden + 8), y(kRows * kHidden + 8), blocks(5 * kRows * kHidden);
  moe::Buffer<std::int32_t, moe::space::cuda> ids(2 * kRows * kTopK);
  moe::Buffer<float, moe::space::cuda> weights(2 * kRows * kTopK);
  moe::Buffer<std::int32_t, moe::space::cuda> counts(5);
  auto const tokens = [&](int rows, int width, int id_rows, int k, int offset = 0) {
    return moe::StandardTokensOf<Config, Quant>{make_rows(static_cast<moe::bf16 const*>(x.data()) + offset, rows, width),
                                                {},
                                                make_rows(static_cast<std::int32_t const*>(ids.data()), id_rows, k),
                                                make_rows(static_cast<float const*>(weights.data()), id_rows, k)};
  };
  auto const out = make_rows(y.data(), kRows, kHidden);
  auto const says = [&](moe::StandardTokensOf<Config, Quant> const& t, moe::Rows<moe::bf16> to, char const* part) {
    std::string const said = refusal([&] { kernel.apply(t, to, nullptr); });
    EXPECT_EQ(said.rfind("E_ARG", 0), 0U) << said;
    EXPECT_NE(said.find(part), std::string::npos) << said;
  };
  says(tokens(kRows, kHidden, kRows - 1, kTopK), out, "rows of topk_ids: 9, expected 10");
  says(tokens(kRows, kHidden, kRows, 1), out, "columns of topk_ids: 1, expected 2");
  says(tokens(kRows, 120, kRows, kTopK), out, "columns of x: 120, expected 128");
  says(tokens(kRows + 1, 64, kRows + 1, kTopK), out, "11 rows, capacity 10");
  says(tokens(kRows, kHidden, kRows, kTopK), make_rows(y.data(), kRows, 64), "columns of the output: 64");
  says(tokens(kRows, kHidden, kRows, kTopK, 1), out, "multiple of 16");
  says(tokens(kRows, kHidden, kRows, kTopK), make_rows(y.data() + 1, kRows, kHidden), "multiple of 16");

  Batched const batched(shape, store.view(), kRows, Quant{}, {}, {}, arena);
  auto const blocks_of = [&](int experts, int width) {
    return moe::BatchedTokensOf<Config, Quant>{make_blocks(static_cast<moe::bf16 const*>(blocks.data()), experts, kRows, width),
                                               {},
                                               moe::make_vector(static_cast<std::int32_t const*>(counts.data()), experts)};
  };
  auto const block_out = make_blocks(blocks.data(), kExperts, kRows, kHidden);
  EXPECT_NE(refusal([&] { batched.apply(blocks_of(5, kHidden), block_out, nullptr); }).find("blocks of x: 5, expected 4"),
            std::string::npos);
  EXPECT_NE(refusal([&] { batched.apply(blocks_of(4, 64), block_out, nullptr); }).find("columns of x: 64, expected 128"),
            std::string::npos);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

}  // namespace
