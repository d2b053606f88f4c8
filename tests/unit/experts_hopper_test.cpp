// SPDX-License-Identifier: Apache-2.0
// tests/unit/experts_hopper_test.cpp: the host side of the Hopper experts: activation formulas, tiles, shared memory, workspace, and
// refused devices, sizes and compositions.
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <sstream>
#include <string>
#include <utility>

#include "archetypes.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/experts/hopper/common/split_model.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_tensor.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int8_group128.hpp"
#include "moe/quantization/int8_per_channel.hpp"
#include "moe/quantization/int8_per_token.hpp"
#include "moe/quantization/none.hpp"

namespace {

using namespace moe;
using namespace moe::hopper;
using activation::Constants;
using activation::Kind;
using Sizes = moe::hopper::LocalShape;

Constants limited(float limit) { return {1.702F, 1.0F, limit, 4.0F, 25.0F}; }

TEST(HopperActivation, X2_Table) {
  struct Row {
    Kind kind;
    Constants constants;
    float gate, up, value;
  };
  Row const rows[] = {{Kind::silu, {}, 1, 0.5F, 0.365529F},
                      {Kind::gelu, {}, 1, 0.5F, 0.420672F},
                      {Kind::gelu_tanh, {}, 1, 0.5F, 0.420596F},
                      {Kind::swigluoai, limited(7), 1, 0.5F, 1.268694F},
                      {Kind::silu_clamped, limited(7), 1, 0.5F, 0.365529F},
                      {Kind::swiglu_step, limited(7), 1, 0.5F, 0.365529F},
                      {Kind::situ, {}, 1, 0.5F, 0.358052F},
                      {Kind::silu, {}, 8, -9, -71.975855F},
                      {Kind::swigluoai, limited(7), 8, -9, -41.999719F},
                      {Kind::silu_clamped, limited(7), 8, -9, -48.955358F},
                      {Kind::swiglu_step, limited(7), 8, -9, -49},
                      {Kind::situ, {}, 8, -9, -33.268425F},
                      {Kind::silu, {}, -3, 2, -0.284555F},
                      {Kind::swigluoai, limited(7), -3, 2, -0.054214F}};
  for (Row const& r : rows) {
    float const value = evaluate(activation_params(r.kind, r.constants), r.gate, r.up);
    EXPECT_NEAR(value, r.value, 1e-6 * std::max(1.0F, std::fabs(r.value)))
        << activation::name(r.kind) << "(" << r.gate << ", " << r.up << ")";
  }
}

TEST(HopperActivation, X23_EveryKindIsItsDefinition) {
  for (int k = 0; k < activation::kKinds; ++k) {
    auto const kind = static_cast<Kind>(k);
    Constants const c = limited(k % 2 == 0 ? 7.0F : 1.5F);
    ActivationParams const p = activation_params(kind, c);
    // The kernels' tanh and erf have absolute errors of 1e-7, which situ multiplies by up to 4 and 25, gelu by gate and up.
    bool const approximate = kind == Kind::situ || kind == Kind::gelu || kind == Kind::gelu_no_mul;
    float const near = approximate ? 1e-5F : 2e-6F;
    EXPECT_EQ(p.gated, activation::gated(kind));
    EXPECT_EQ(evaluate(p, 0, 0), 0.0F) << activation::name(kind) << ": what lies past the end of a tile must stay zero";
    for (float gate : {-20.0F, -3.0F, -0.1F, 0.01F, 1.0F, 6.5F, 40.0F}) {
      for (float up : {-9.0F, -0.3F, 0.7F, 30.0F}) {
        float const want = activation::apply(kind, c, gate, up);
        EXPECT_NEAR(evaluate(p, gate, up), want, near * std::max(1.0F, std::fabs(want)))
            << activation::name(kind) << "(" << gate << ", " << up << ")";
      }
    }
  }
}

TEST(HopperTiles, FitIntoTheSharedMemoryOfABlock) {
  EXPECT_LE((layer_smem_bytes<Scheme::bf16, DefaultTiles>()), kSharedMemoryLimit);
  EXPECT_LE((layer_smem_bytes<Scheme::f16, DefaultTiles>()), kSharedMemoryLimit);
  EXPECT_LE((layer_smem_bytes<Scheme::fp8_block, DefaultTiles>()), kSharedMemoryLimit);
  EXPECT_LE((layer_smem_bytes<Scheme::fp8_row, DefaultTiles>()), kSharedMemoryLimit);
  EXPECT_LE((layer_smem_bytes<Scheme::int8_row, DefaultTiles>()), kSharedMemoryLimit);
  EXPECT_GT((SmemLayout<Scheme::bf16, 5, 160>::kBytes), kSharedMemoryLimit);
}

TEST(HopperTiles, ChoiceFollowsRowsAndPrints) {
  Sizes const shape{128, 2048, 768, 8};
  for (Scheme scheme : {Scheme::bf16, Scheme::fp8_block, Scheme::fp8_row, Scheme::int8_row}) {
    int last = 0;
    for (int tokens : {1, 8, 16, 64, 256, 1024, 4096, 16384}) {
      Tuning const t = choose_tuning(shape, scheme, tokens);
      EXPECT_EQ(t, choose_tuning(shape, scheme, tokens));
      EXPECT_GE(t.tile_rows, last) << "more tokens take no smaller tile";
      EXPECT_LE(t.tile_rows, scheme == Scheme::fp8_block ? kBlockRows : most_rows(scheme));
      EXPECT_TRUE(t.cluster == 1 || t.tile_rows > 64);
      EXPECT_TRUE(!t.self_align || tokens * shape.topk <= 128);
      last = t.tile_rows;
    }
  }
  // Tiles of at most 16 rows quantise x as they load it, at any hidden size. With larger tiles each thread block would quantise all of x.
  for (int tokens : {1, 8, 16}) EXPECT_TRUE(choose_tuning({256, 7168, 2048, 8}, Scheme::fp8_block, tokens).self_align);
  for (int tokens : {17, 128}) EXPECT_FALSE(choose_tuning({32, 7168, 2048, 1}, Scheme::fp8_block, tokens).self_align);
  for (bool quantises : {true, false}) EXPECT_EQ(choose_tuning({8, 512, 256, 1}, Scheme::fp8_block, 128, quantises).self_align, !quantises);
  std::ostringstream printed;
  printed << choose_tuning(shape, Scheme::bf16, 1);
  EXPECT_NE(printed.str().find("tile_rows 8"), std::string::npos) << printed.str();
}

TEST(HopperTiles, BatchesLeaveRoomForTheRowsOfRandomRouting) {
  Sizes const shape{32, 2048, 768, 8};
  auto const rows = [&](int expected) { return choose_batched_tuning(shape, Scheme::bf16, expected, 64).tile_rows; };
  EXPECT_EQ(rows(1), 8);
  EXPECT_EQ(rows(3), 8);   // 7.8 likely rows
  EXPECT_EQ(rows(4), 16);  // 9.6
  EXPECT_EQ(rows(8), 16);  // 15.9
  EXPECT_EQ(rows(16), choose_tuning({32, 2048, 768, 1}, Scheme::bf16, 32 * 16).tile_rows);
  EXPECT_EQ(rows(1000), choose_tuning({32, 2048, 768, 1}, Scheme::bf16, 32 * 64).tile_rows);  // the capacity
}

TEST(HopperTiles, KIsCutInTilesOfWholeColumnCounts) {
  for (int rows : {8, 16, 32, 64, 96}) EXPECT_TRUE(is_column_count(rows)) << rows;
  for (int rows : {4, 12, 24, 40, 48, 56, 72, 80, 88}) EXPECT_FALSE(is_column_count(rows)) << rows;
  for (int tokens : {1, 8, 64}) {  // tiles for few rows must allow a split of K
    EXPECT_TRUE(is_column_count(choose_tuning({32, 7168, 2048, 1}, Scheme::bf16, tokens).tile_rows));
    EXPECT_TRUE(is_column_count(choose_tuning({32, 7168, 2048, 1}, Scheme::fp8_block, tokens).tile_rows));
  }
}

TEST(HopperTiles, MeasuredTableIsInOrder) {
  for (Scheme scheme : {Scheme::bf16, Scheme::fp8_block}) {
    std::int64_t rows = -1;
    int tile = 0;
    for (TileChoice const& c : kMeasuredTiles) {
      if (c.scheme != scheme) continue;
      EXPECT_GT(c.rows, rows);
      EXPECT_GE(c.tile_rows, tile) << "more rows take no smaller tile";
      EXPECT_EQ(c.tile_rows % 8, 0);
      EXPECT_LE(c.tile_rows, std::max(most_rows(scheme), scheme == Scheme::fp8_block ? kBlockRows : 0));
      EXPECT_TRUE(c.cluster == 1 || c.cluster == 2);
      rows = c.rows;
      tile = c.tile_rows;
    }
    EXPECT_EQ(rows, kAnyRows);
  }
}

// Manual choices take precedence over measured ones, at every boundary of either.
TEST(HopperTiles, HandChoicesComeFirst) {
  struct Range {
    Scheme scheme;
    std::int64_t first, last;
    int tile_rows, cluster;
  };
  for (Range const& r : {Range{Scheme::bf16, 0, 52, 64, 1},
                         {Scheme::bf16, 53, 82, 96, 1},
                         {Scheme::bf16, 83, 160, 160, 1},
                         {Scheme::bf16, 161, 310, 160, 2},
                         {Scheme::bf16, 311, 440, 160, 1},
                         {Scheme::bf16, 441, kAnyRows, 160, 2},
                         {Scheme::fp8_block, 0, 20, 64, 1},
                         {Scheme::fp8_block, 21, 76, 80, 1},
                         {Scheme::fp8_block, 77, kAnyRows, 128, 1}}) {
    for (std::int64_t rows : {r.first, r.last}) {
      for (Scheme scheme : {r.scheme, r.scheme == Scheme::bf16 ? Scheme::f16 : Scheme::fp8_row}) {
        TileChoice const c = tile_choice(scheme, rows);
        EXPECT_EQ(c.tile_rows, r.tile_rows) << name(scheme) << " " << rows;
        EXPECT_EQ(c.cluster, r.cluster) << name(scheme) << " " << rows;
      }
    }
  }
}

TEST(HopperTiles, ManyRowsTakeBlockTilesInBlockScaledFp8Alone) {
  Sizes const shape{128, 2048, 768, 8};
  for (bool quantises : {true, false}) EXPECT_EQ(choose_tuning(shape, Scheme::fp8_block, 16384, quantises).tile_rows, kBlockRows);
  Tuning const t = choose_tuning(shape, Scheme::fp8_row, 16384);
  EXPECT_EQ(t.tile_rows, most_rows(Scheme::fp8_row));
  EXPECT_EQ(t.cluster, 1);
}

// int8 takes bf16's tiles as far as it has them. Its kernels have no clusters, at any number of rows.
TEST(HopperTiles, Int8TakesTheTilesOfBf16WithoutClusters) {
  Sizes const shape{128, 2048, 768, 8};
  for (int tokens : {1, 8, 64, 256, 1024, 2048, 4096, 16384}) {
    Tuning const t = choose_tuning(shape, Scheme::int8_row, tokens);
    EXPECT_EQ(t.tile_rows, std::min(choose_tuning(shape, Scheme::bf16, tokens).tile_rows, most_rows(Scheme::int8_row))) << tokens;
    EXPECT_EQ(t.cluster, 1) << tokens;
  }
  EXPECT_EQ(element_bytes(Scheme::int8_row), 1);
  EXPECT_TRUE(is_row_scaled(Scheme::int8_row) && is_scaled(Scheme::int8_row) && !is_fp8(Scheme::int8_row));
}

TEST(HopperTiles, OneTokenByBytesOfItsWeights) {
  EXPECT_TRUE(choose_tuning({128, 2048, 768, 8}, Scheme::bf16, 1).one_token);
  EXPECT_FALSE(choose_tuning({128, 2048, 768, 8}, Scheme::bf16, 2).one_token);
  EXPECT_TRUE(choose_tuning({8, 4096, 14336, 2}, Scheme::bf16, 1).one_token);
  EXPECT_FALSE(choose_tuning({8, 8192, 28672, 2}, Scheme::bf16, 1).one_token);
}

/// The splits that the planning warp chooses for both phases.
std::pair<int, int> splits(Sizes const& shape, Scheme scheme, int tiles, int rows, int max_splits = 16) {
  int const step = is_fp8(scheme) ? 128 : 64;
  auto const choose = [&](int weight_tiles, int width, int before) {
    SplitProblem const p{tiles * weight_tiles, rows, (width + step - 1) / step, 132, max_splits, 8192, before};
    int best = 1;
    for (int s = 2; s <= kMostSplits; ++s) {
      if (may_split(p, s) && split_cost(p, s) < split_cost(p, best)) best = s;
    }
    return std::pair{best, p.k_steps / best};
  };
  auto const [first, before] = choose((shape.intermediate + 127) / 128, shape.hidden, 0);
  return {first, choose((shape.hidden + 255) / 256, shape.intermediate, before).first};
}

TEST(HopperSplits, ThoseThatWereFastestOnTheDevice) {
  Sizes const deepseek{32, 7168, 2048, 1};
  Sizes const mixtral{8, 4096, 14336, 2};
  Sizes const qwen235b{128, 4096, 1536, 8};
  using Pair = std::pair<int, int>;
  EXPECT_EQ(splits(deepseek, Scheme::bf16, 6, 1), Pair(4, 1));              // 8 tokens: 161 us unsplit, 149 split
  EXPECT_EQ(splits(deepseek, Scheme::fp8_block, 6, 1), Pair(4, 1));         // 86.8 us, 82.4 without a kernel before; with it 85.5, 86.6
  EXPECT_EQ(splits({128, 2048, 768, 8}, Scheme::bf16, 49, 1), Pair(1, 1));  // 8 tokens: 124 us; 127 in (2, 1)
  EXPECT_EQ(splits(mixtral, Scheme::bf16, 8, 2), Pair(1, 4));               // 8 tokens: 615 us, 605
  EXPECT_EQ(splits(mixtral, Scheme::bf16, 8, 16), Pair(1, 2));              // 64 tokens: 702 us, 671; 684 in (1, 4)
  EXPECT_EQ(splits(mixtral, Scheme::bf16, 2, 1), Pair(1, 4));               // one token: 175 us; 182 in (1, 8)
  EXPECT_EQ(splits(qwen235b, Scheme::bf16, 8, 1), Pair(4, 1));              // one token: 90.6 us, 81.6; 92.5 in (2, 2)
  EXPECT_EQ(splits({128, 2880, 2880, 4}, Scheme::bf16, 4, 1), Pair(3, 3));  // one token: 71.7 us, 62.6
  EXPECT_EQ(splits(deepseek, Scheme::bf16, 6, 1, 1), Pair(1, 1));           // batch-invariant layers do not split
  EXPECT_FALSE(may_split({6, 1, 4, 132, 16, 8192, 0}, 5));                  // more parts than steps
  EXPECT_FALSE(may_split({300, 1, 64, 132, 16, 8192, 0}, 2));               // enough tiles
  EXPECT_FALSE(may_split({100, 64, 64, 132, 16, 512, 0}, 6));               // no room for so many parts
}

TEST(HopperTiles, WorkspacePartsAreAlignedAndApart) {
  for (Scheme scheme : {Scheme::bf16, Scheme::fp8_block, Scheme::fp8_row, Scheme::int8_row}) {
    Workspace const w = plan_workspace({128, 2048, 768, 8}, scheme, 1000, 8);
    std::int64_t last = -1;
    for (std::int64_t at : {w.control, w.tiles, w.counters, w.sorted_rows, w.x_codes, w.x_scales, w.inter, w.inter_wide, w.inter_scales,
                            w.slot_rows, w.partials, w.bytes}) {
      EXPECT_EQ(at % 1024, 0);
      EXPECT_GE(at, last);
      last = at;
    }
    EXPECT_GE(w.slot_rows - w.inter, 8000 * 768 * (scheme == Scheme::bf16 ? 2 : 1));
    std::int64_t const wide = scheme == Scheme::int8_row ? 4 : scheme == Scheme::fp8_row ? 2 : 0;
    EXPECT_GE(w.inter_scales - w.inter_wide, 8000 * 768 * wide) << "a row that waits for its scale: float32 in int8, bf16 in fp8";
  }
  EXPECT_GT(plan_workspace({8, 256, 16384, 8}, Scheme::bf16, 16400, 8).bytes, std::int64_t{1} << 32);  // sizes have 64 bits
}

std::string refusal(auto&& call) {
  try {
    call();
  } catch (Error const& e) {
    return e.what();
  }
  return "";
}

TEST(HopperRefusals, X22_DeviceIsNamedWithTheFallback) {
  EXPECT_EQ(refusal([] { check_device(0, "H200", 9, 0); }), "");
  for (auto [major, minor] : {std::pair{8, 0}, {8, 9}, {10, 0}, {12, 0}}) {
    std::string const said = refusal([&, a = major, b = minor] { check_device(3, "Some GPU", a, b); });
    EXPECT_EQ(said.rfind("E_UNSUPPORTED", 0), 0U) << said;
    for (std::string part : {std::string("device 3 (Some GPU)"), text(major, ".", minor), std::string("cuda_reference")}) {
      EXPECT_NE(said.find(part), std::string::npos) << said;
    }
  }
}

TEST(HopperRefusals, SizesThatTheKernelsCannotTake) {
  auto const says = [](Sizes s, Scheme scheme, char const* part) {
    std::string const said = refusal([&] { check_sizes(s, scheme); });
    EXPECT_NE(said.find(part), std::string::npos) << said;
    EXPECT_EQ(said.rfind("E_CONFIG", 0), 0U) << said;
  };
  EXPECT_EQ(refusal([] { check_sizes({8, 72, 40, 2}, Scheme::bf16); }), "");
  EXPECT_EQ(refusal([] { check_sizes({8, 80, 128, 2}, Scheme::fp8_block); }), "");
  says({8, 250, 256, 2}, Scheme::bf16, "hidden 250 must be a multiple of 8 in bf16");
  says({8, 256, 100, 2}, Scheme::f16, "intermediate 100 must be a multiple of 8 in f16");
  says({8, 72, 256, 2}, Scheme::fp8_row, "hidden 72 must be a multiple of 16 in fp8_row");
  says({8, 256, 192, 2}, Scheme::fp8_block, "intermediate 192 must be a multiple of 128 in fp8_block");
  says({8, 72, 256, 2}, Scheme::int8_row, "hidden 72 must be a multiple of 16 in int8_row");
  says({8, 131072, 256, 2}, Scheme::int8_row, "hidden 131072 is over 131056 in int8_row, where int32 sums could overflow");
  says({8, 256, 262144, 2}, Scheme::int8_row, "intermediate 262144 is over 131056 in int8_row");
  EXPECT_EQ(refusal([] { check_sizes({8, 131056, 131056, 2}, Scheme::int8_row); }), "");
  EXPECT_EQ(refusal([] { check_sizes({8, 131072, 256, 2}, Scheme::fp8_row); }), "") << "only int32 sums have this bound";
  says({1, 64, kMostRowScaledColumns + 16, 1}, Scheme::fp8_row, "intermediate 67092496 is over 67092480 in fp8_row");
  EXPECT_EQ(refusal([] { check_sizes({1, 64, kMostRowScaledColumns, 1}, Scheme::fp8_row); }), "");
  EXPECT_EQ(refusal([] { check_sizes({1, 64, kMostRowScaledColumns + 16, 1}, Scheme::bf16); }), "") << "its rows need no counter";
  static_assert(std::int64_t{128} * 128 * most_columns(Scheme::int8_row) <= std::numeric_limits<std::int32_t>::max());
  static_assert(std::int64_t{128} * 128 * (most_columns(Scheme::int8_row) + 16) > std::numeric_limits<std::int32_t>::max());
  says({0, 256, 256, 2}, Scheme::bf16, "0 local experts");
  says({1025, 256, 256, 2}, Scheme::bf16, "1025 local experts");
  says({8, 256, 256, 0}, Scheme::bf16, "topk 0");
}

template <class T>
struct Config : LayerDefaults {
  using Act = T;
  using Weight = T;
  using Activation = activation::Any;
};
template <class T>
struct TooWide : Config<T> {
  static constexpr int hidden = 131072;  // int32 sums could overflow
};
template <class T, class Quant, class Experts, template <class> class Of = Config>
constexpr char const* reason() {
  return moe::Composition<Of<T>, moe_test::ArchetypeRouter<>, Quant, backends::NoExpertParallel<space::cuda>, Experts>::reason();
}

TEST(HopperRefusals, X16_X22_CompositionsHaveReasons) {
  using namespace quantization;
  using experts::HopperContiguous;
  EXPECT_EQ((reason<bf16, None, HopperContiguous>()), nullptr);
  EXPECT_EQ((reason<f16, None, HopperContiguous>()), nullptr);
  EXPECT_EQ((reason<bf16, Fp8Block<>, HopperContiguous>()), nullptr);
  EXPECT_EQ((reason<bf16, Fp8PerToken<>, HopperContiguous>()), nullptr);
  EXPECT_EQ((reason<bf16, Fp8PerTensor<>, HopperContiguous>()), nullptr);
  EXPECT_EQ((reason<bf16, Fp8PerTensorStatic, HopperContiguous>()), nullptr);
  EXPECT_STREQ((reason<float, None, HopperContiguous>()), rules::ExpertsSupportElement::kSentence);
  EXPECT_EQ((reason<bf16, Int8PerToken, HopperContiguous>()), nullptr);
  EXPECT_EQ((reason<f16, Int8PerToken, HopperContiguous>()), nullptr);
  EXPECT_EQ((reason<bf16, Int8PerTensorStatic, HopperContiguous>()), nullptr);
  EXPECT_STREQ((reason<bf16, Int8PerChannel, HopperContiguous>()), rules::ExpertsSupportQuantization::kSentence);
  EXPECT_STREQ((reason<bf16, Int8Group<>, HopperContiguous>()), rules::ExpertsSupportQuantization::kSentence);
  EXPECT_STREQ((reason<bf16, Int8PerToken, HopperContiguous, TooWide>()), rules::ExpertsFitShape::kSentence);
  EXPECT_EQ((reason<bf16, Fp8PerToken<>, HopperContiguous, TooWide>()), nullptr);
  EXPECT_STREQ((reason<bf16, None, experts::HopperMasked>()), rules::ActivationFormatMatches::kSentence);
}

}  // namespace
