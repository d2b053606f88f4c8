// SPDX-License-Identifier: Apache-2.0
// tests/unit/hopper_w4_test.cpp: the host side of the Hopper layer with 4- and 8-bit weights: where codes lie, sizes, tiles, workspace,
// refusals.
#include "moe/experts/hopper_w4a16.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "moe/experts/hopper/w4/a8/codes.hpp"
#include "moe/experts/hopper/w4/codes.hpp"
#include "moe/experts/hopper/w4/row_factors.hpp"
#include "moe/experts/hopper/w4/token_plan.hpp"
#include "moe/experts/hopper/w4a8_layer.hpp"
#include "moe/quantization/mxfp4.hpp"

namespace {

using namespace moe;
using namespace moe::hopper;

/// The value of half a fragment register as bf16, times 2^126.
float value_of(std::uint32_t half) { return std::ldexp(std::bit_cast<float>(half << 16), 126); }

TEST(HopperW4, E2m1CodesComeBackFromTheirWords) {
  constexpr float kValues[8] = {0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F};
  auto const want = [&](std::uint32_t code) { return (code & 8u) != 0 ? -kValues[code & 7u] : kValues[code & 7u]; };
  std::mt19937 gen(1);
  for (int round = 0; round < 4096; ++round) {
    std::uint32_t f[8];
    for (std::uint32_t& v : f) v = gen() & 0xFFu;
    if (round < 256) f[round % 8] = static_cast<std::uint32_t>(round);
    std::uint32_t first = 0;
    std::uint32_t second = 0;
    pack_e2m1(f, first, second);
    for (int i = 0; i < 8; ++i) {
      std::uint32_t const got = unpack_e2m1(first, second, i);
      EXPECT_EQ(got & ~kE2m1Bits, 0u);
      EXPECT_EQ(value_of(got & 0xFFFFu), want(f[i] & 15u)) << "register " << i;
      EXPECT_EQ(value_of(got >> 16), want(f[i] >> 4)) << "register " << i;
      EXPECT_EQ(std::signbit(value_of(got & 0xFFFFu)), (f[i] & 8u) != 0);
    }
  }
}

TEST(HopperW4, EveryBitOfAPairIsUsedOnce) {
  std::uint32_t const ones[8] = {255, 255, 255, 255, 255, 255, 255, 255};
  std::uint32_t first = 0;
  std::uint32_t second = 0;
  pack_e2m1(ones, first, second);
  EXPECT_EQ(first, 0xFFFFFFFFu);
  EXPECT_EQ(second, 0xFFFFFFFFu);
}

// As the kernel converts them: a difference of two bf16, which is exact.
TEST(HopperW4, Int8CodesComeBackFromTheirWords) {
  auto const as_float = [](std::uint32_t half) { return std::bit_cast<float>(half << 16); };
  for (std::uint32_t code = 0; code < 256; ++code) {
    std::uint32_t const other = (code * 7 + 3) & 0xFFu;
    for (std::uint32_t const pair : {code | other << 8, other | code << 8}) {
      std::uint32_t const word = pack_bytes({pair, ~pair & 0xFFFFu});
      for (int f = 0; f < 2; ++f) {
        std::uint32_t const want = f == 0 ? pair : ~pair & 0xFFFFu;
        for (int half = 0; half < 2; ++half) {
          float const difference =
              as_float(int8_sums(word, f) >> (16 * half) & 0xFFFFu) - as_float(int8_bases(word, f) >> (16 * half) & 0xFFFFu);
          EXPECT_EQ(difference, static_cast<float>(static_cast<std::int8_t>(want >> (8 * half) & 0xFFu))) << code;
          EXPECT_EQ(std::bit_cast<std::uint32_t>(difference) & 0xFFFFu, 0u) << "a bf16";
        }
      }
    }
  }
}

TEST(HopperW4, Nvfp4ScalesComeBackFromTheirBytes) {
  for (std::uint32_t code = 0; code < 0x7F; ++code) {
    float const magnitude = code < 8 ? std::ldexp(static_cast<float>(code), -9)
                                     : std::ldexp(1.0F + static_cast<float>(code & 7u) / 8.0F, static_cast<int>(code >> 3) - 7);
    std::uint32_t const byte = nvfp4_scale_byte(code);
    EXPECT_LT(byte, 256u);
    EXPECT_EQ(nvfp4_scale_byte(code | 0x80u), byte) << "the sign goes to the codes";
    std::uint32_t const bits = (byte << 4) + kNvfp4ScaleBase;
    float const stored = std::bit_cast<float>(bits << 16);
    if (code != 0) {
      EXPECT_EQ(std::ldexp(stored, -119), magnitude) << code;
    }
    // The code 6 times the scale, as the kernel multiplies them, is exact in bf16.
    float const product = std::ldexp(6.0F, -126) * stored;
    EXPECT_EQ(std::bit_cast<std::uint32_t>(product) & 0xFFFFu, 0u);
    if (code != 0) {
      EXPECT_EQ(product * kNvfp4Factor, 6.0F * magnitude);
    }
  }
}

TEST(HopperW4, BytesOfTheWeights) {
  EXPECT_EQ(packed_bytes(W4Scheme::int4_32, 64, 64), 2048 + 256 + 64 * 4) << "a factor for each row";
  EXPECT_EQ(packed_bytes(W4Scheme::int4_32_zero, 64, 64), 2048 + 256 + 128 + 64 * 4);
  EXPECT_EQ(packed_bytes(W4Scheme::nvfp4, 64, 64), 2048 + 256) << "4.5 bits a weight";
  EXPECT_EQ(packed_bytes(W4Scheme::mxfp4, 64, 64), 2048 + 128) << "4.25 bits a weight";
  EXPECT_EQ(packed_bytes(W4Scheme::int4_zero, 128, 64), 2 * (2048 + 256) + 128 * 4);
  EXPECT_EQ(packed_bytes(W4Scheme::int8, 128, 64), 2 * 4096 + 128 * 4) << "a scale for each row";
  EXPECT_EQ(W4A16Layer::packed_bytes({2, 128, 96, 1}, W4Scheme::int8) - W4A16Layer::packed_bytes({0, 128, 96, 1}, W4Scheme::int8),
            2 * (12 * 4096 + (256 + 128) * 4));
  hopper::LocalShape const s{2, 128, 96, 1};
  EXPECT_EQ(W4A16Layer::packed_bytes(s, W4Scheme::mxfp4) - W4A16Layer::packed_bytes({0, 128, 96, 1}, W4Scheme::mxfp4), 2 * 12 * 2176)
      << "an intermediate of 96 takes the room of 128";
  EXPECT_EQ(W4A16Layer::packed_bytes(s, W4Scheme::mxfp4, false) - W4A16Layer::packed_bytes({0, 128, 96, 1}, W4Scheme::mxfp4, false),
            2 * 8 * 2176)
      << "without a gate w13 has half the rows";
}

/// The scales of a row of int4 of that many groups, of 11 significant bits and either sign: the first and largest in [1, 2) times
/// 2^exponent, the others at most `spread` binades below it.
std::vector<float> row_of_scales(std::size_t groups, int exponent, int spread, std::mt19937& gen) {
  std::vector<float> row(groups);
  for (std::size_t g = 0; g < groups; ++g) {
    float const value = 1.0F + static_cast<float>(gen() % 1024) / 1024.0F;
    int const below = g == 0 ? 0 : 1 + static_cast<int>(gen() % static_cast<unsigned>(spread));
    row[g] = std::ldexp(gen() % 8 == 0 ? -value : value, exponent - below);
  }
  return row;
}
int largest_of(std::vector<float> const& scales) {
  int most = 0;
  for (float v : scales) most = larger_scale(most, std::bit_cast<std::uint32_t>(v));
  return most;
}

// As W4A16's packing stores them and its epilogue multiplies the sums.
TEST(HopperW4, Int4ScalesOfRowsFarApartComeBack) {
  std::mt19937 gen(5);
  for (int exponent = -98; exponent <= 123; ++exponent) {  // 28 binades below the first, 11 bits are normal numbers
    std::vector<float> const row = row_of_scales(12, exponent, 28, gen);
    int const stored = wide_exponent(largest_of(row));
    float const factor = std::ldexp(1.0F, stored);
    EXPECT_EQ(exponent_of(factor), stored) << "what find_row_factors writes and pack_bricks reads";
    for (float v : row) EXPECT_EQ(to_float(scale_over(v, stored)) * factor, v) << "2^" << exponent;
  }
}

TEST(HopperW4, Int4ScalesBelowTheirRowsLargestAreRoundedThenZero) {
  std::mt19937 gen(6);
  for (int below = 29; below <= 60; ++below) {
    float const value = std::ldexp(1.0F + static_cast<float>(gen() % 1024) / 1024.0F, 20 - below);
    int const stored = wide_exponent(std::bit_cast<int>(std::ldexp(1.5F, 20)));
    double const got = std::ldexp(static_cast<double>(to_float(scale_over(value, stored))), stored);
    if (below < 39) {
      EXPECT_LE(std::abs(got - value), std::ldexp(value, below - 28 - 11)) << below << ": 11 bits less one for each binade past 28";
    }
    if (below >= 40) {
      EXPECT_EQ(got, 0.0) << below;
    }
  }
  int const zeros = wide_exponent(0);
  EXPECT_EQ(to_float(scale_over(0.0F, zeros)), 0.0F);
  EXPECT_EQ(std::ldexp(1.0F, zeros), std::ldexp(1.0F, -140)) << "not zero: zero times infinity is not a number";
  EXPECT_EQ(unit_exponent(0), -126);
  float const least = std::numeric_limits<float>::denorm_min();
  EXPECT_EQ(to_float(scale_over(least, wide_exponent(std::bit_cast<int>(least)))) * std::ldexp(1.0F, zeros), least);
  float const most = std::numeric_limits<float>::max() / 16;
  EXPECT_TRUE(std::isfinite(to_float(scale_over(most, wide_exponent(std::bit_cast<int>(most))))));
  std::uint32_t const infinity = std::bit_cast<std::uint32_t>(std::numeric_limits<float>::infinity());
  EXPECT_EQ(larger_scale(5, infinity), 5) << "does not count";
  EXPECT_EQ(larger_scale(5, 0x80000007u), 7) << "without its sign";
}

// Every code of e4m3 that is a number, in each place of a word.
TEST(HopperW4, E4m3CodesBecomeBf16) {
  static_assert(hopper::kE4m3Multiplier == 0x7B807B80u, "2^120, twice");
  for (std::uint32_t code = 0; code < 256; ++code) {
    if ((code & 0x7F) == 0x7F) continue;
    float const value = quantization::decode_e4m3(static_cast<std::uint8_t>(code));
    std::uint32_t const other = (code * 37 + 11) & 0x7D;
    for (int f = 0; f < 2; ++f) {
      for (int half = 0; half < 2; ++half) {
        std::uint32_t registers[2] = {other | other << 8, other | other << 8};
        registers[f] = half == 0 ? code | other << 8 : other | code << 8;
        std::uint32_t const found = hopper::e4m3_values(hopper::pack_bytes(registers), f) >> (16 * half) & 0xFFFFu;
        EXPECT_EQ(std::ldexp(std::bit_cast<float>(found << 16), 120), value) << code << ", register " << f << ", half " << half;
      }
    }
  }
}

TEST(HopperW4, TilesAndWorkspaceFitEveryCall) {
  for (hopper::LocalShape const& s :
       {hopper::LocalShape{32, 2880, 2880, 4}, hopper::LocalShape{384, 7168, 2048, 8}, hopper::LocalShape{1, 64, 64, 1}}) {
    std::int64_t before = 0;
    for (int tokens : {1, 7, 64, 1000, 16384}) {
      for (W4Scheme scheme : {W4Scheme::int4, W4Scheme::int4_zero, W4Scheme::mxfp4, W4Scheme::int4_32, W4Scheme::int4_32_zero,
                              W4Scheme::nvfp4, W4Scheme::int8}) {
        W4Tuning const t = choose_w4_tuning(s, scheme, tokens);
        EXPECT_EQ(t.tile_rows % 8, 0);
        EXPECT_GE(t.tile_rows, 8);
        EXPECT_LE(t.tile_rows, most_rows(scheme));
        EXPECT_LE(std::int64_t{tokens} * s.topk / t.tile_rows + s.num_experts, plan_w4_workspace(s, tokens).max_tiles);
      }
      std::int64_t const bytes = plan_w4_workspace(s, tokens).bytes;
      EXPECT_GE(bytes, before);
      before = bytes;
    }
  }
}

TEST(HopperW4, DivisorsDivideExactly) {
  for (int divisor : {1, 2, 3, 5, 7, 12, 45, 132, 8100, 65535, 65536, 1 << 21, (1 << 30) + 1, std::numeric_limits<int>::max()}) {
    hopper::Divisor const by(divisor);
    for (long long near : {0LL, 1LL, 2LL, 1000LL, (1LL << 21) * 132 / divisor, (1LL << 31) / divisor}) {
      for (long long n = near * divisor - 2; n <= near * divisor + 2; ++n) {
        if (n < 0 || n > std::numeric_limits<int>::max()) continue;
        ASSERT_EQ(by.quotient(static_cast<int>(n)), n / divisor) << n << " / " << divisor;
      }
    }
  }
}

/// Every unit has one thread block and one warp; what blocks know of each other's units is right.
void expect_units_divided(int slots, int hidden, int intermediate, int blocks, int warps) {
  hopper::w4::TokenUnits const all(slots, hidden, intermediate, blocks, warps);
  SCOPED_TRACE(testing::Message() << slots << " slots, " << hidden << " x " << intermediate << ", " << blocks << " blocks of " << warps);
  int const steps[2] = {hidden / 64, intermediate / 64};
  int const pairs[2] = {steps[1], (steps[0] + 1) / 2};
  for (int phase : {0, 1}) {
    ASSERT_EQ(all.units[phase], slots * pairs[phase] * steps[phase]);
    std::vector<int> runs_blocks(static_cast<std::size_t>(phase == 0 ? slots * pairs[0] : pairs[1]), 0);
    int next = 0;
    for (int block = 0; block < blocks; ++block) {
      auto const of_block = all.of_block(phase, block);
      auto const runs = all.runs_of(phase, of_block);
      ASSERT_EQ(of_block.size() == 0, block >= all.parts[phase]);
      for (int warp = 0; warp < warps; ++warp) {
        auto const of_warp = of_block.part(warp, all.by_warps);
        for (int unit = of_warp.begin; unit < of_warp.end; ++unit, ++next) {
          ASSERT_EQ(unit, next);
          ASSERT_EQ(all.block_of(phase, unit), block);
          hopper::w4::TokenUnit const u(all, phase, unit);
          int const run = phase == 0 ? u.slot * pairs[0] + u.pair : u.pair;
          ASSERT_TRUE(run >= runs.begin && run < runs.end && u.step < steps[phase] && u.slot < slots && u.pair < pairs[phase]);
          ASSERT_EQ(unit, phase == 0 ? (u.slot * pairs[0] + u.pair) * steps[0] + u.step : (u.pair * slots + u.slot) * steps[1] + u.step);
        }
      }
      for (int run = runs.begin; run < runs.end; ++run) {
        ASSERT_EQ(block - all.first_block(phase, run), runs_blocks[static_cast<std::size_t>(run)]++);
      }
    }
    ASSERT_EQ(next, all.units[phase]);
    for (std::size_t run = 0; run < runs_blocks.size(); ++run) ASSERT_EQ(all.blocks_of(phase, static_cast<int>(run)), runs_blocks[run]);
  }
}

TEST(HopperW4, OneTokensUnitsAreDividedAmongBlocksAndWarps) {
  for (int slots : {1, 3, 8}) {
    expect_units_divided(slots, 2048, 768, 132, 16);
    expect_units_divided(slots, 2880, 2880, 132, 16);
    expect_units_divided(slots, 1152, 640, 132, 12);
    expect_units_divided(slots, 1152, 640, 7, 16);
    expect_units_divided(slots, 128, 64, 132, 6);  // fewer units than blocks
  }
}

TEST(HopperW4, OneTokensKernelTakesLayersThatFillTheDevice) {
  using hopper::w4::plan_packed_token;
  for (W4Scheme scheme :
       {W4Scheme::int4, W4Scheme::int4_32_zero, W4Scheme::mxfp4, W4Scheme::nvfp4, W4Scheme::int8, W4Scheme::fp8, W4Scheme::mxfp8}) {
    for (hopper::LocalShape const& s : {hopper::LocalShape{128, 2880, 2880, 4}, hopper::LocalShape{384, 7168, 2048, 8},
                                        hopper::LocalShape{128, 2048, 768, 8}, hopper::LocalShape{8, 4096, 14336, 2}}) {
      auto const plan = plan_packed_token(s, scheme, 132);
      EXPECT_GE(plan.warps, 6) << name(scheme) << ", " << s.hidden;
      EXPECT_LE(plan.bytes, hopper::kSharedMemoryLimit - 4096);
      EXPECT_EQ(plan.buffers_at % 128, 0);
    }
    EXPECT_TRUE(choose_w4_tuning({128, 2880, 2880, 4}, scheme, 1).one_token);
    EXPECT_FALSE(choose_w4_tuning({128, 2880, 2880, 4}, scheme, 2).one_token);
    EXPECT_FALSE(choose_w4_tuning({384, 7168, 2048, 8}, scheme, 1).one_token) << "so many weights are faster in the layer kernel";
    EXPECT_EQ(plan_packed_token({8, 256, 192, 2}, scheme, 132).warps, 0) << "a pair of bricks would be shared by more than 16 blocks";
    EXPECT_EQ(plan_packed_token({128, 2880, 2880, 4}, scheme, 3).warps, 0) << "a warp would touch more than two pairs";
    EXPECT_EQ(plan_packed_token({128, 2880, 2880, 33}, scheme, 132).warps, 0) << "a slot for each lane at most";
  }
}

ErrorCode refusal(hopper::LocalShape shape, W4Scheme scheme, int group, W4Weights w = {}) {
  w.w13_group = group;
  w.w2_group = group;
  try {
    check_w4(shape, scheme, w);
  } catch (Error const& e) {
    return e.code();
  }
  return ErrorCode::internal;
}

TEST(HopperW4, Refusals) {
  alignas(16) static std::uint8_t const memory[32] = {};
  W4Weights const w{memory, memory, memory, memory};
  EXPECT_EQ(refusal({2, 128, 128, 1}, W4Scheme::int4, 64, w), ErrorCode::internal) << "fits";
  EXPECT_EQ(refusal({2, 128, 96, 1}, W4Scheme::mxfp4, 32, w), ErrorCode::internal) << "half a brick is padded";
  EXPECT_EQ(refusal({2, 96, 128, 1}, W4Scheme::mxfp4, 32, w), ErrorCode::config) << "hidden";
  EXPECT_EQ(refusal({2, 128, 80, 1}, W4Scheme::mxfp4, 32, w), ErrorCode::config) << "intermediate";
  EXPECT_EQ(refusal({2, 128, 96, 1}, W4Scheme::int4, 32, w), ErrorCode::config) << "intermediate of int4";
  EXPECT_EQ(refusal({2, 128, 128, 1}, W4Scheme::int4, 32, w), ErrorCode::config) << "group";
  EXPECT_EQ(refusal({2, 128, 128, 1}, W4Scheme::int4_32, 32, w), ErrorCode::internal) << "fits";
  EXPECT_EQ(refusal({2, 128, 128, 1}, W4Scheme::int4_32, 64, w), ErrorCode::config) << "group of int4_32";
  EXPECT_EQ(refusal({2, 128, 96, 1}, W4Scheme::nvfp4, 16, w), ErrorCode::internal) << "half a brick is padded";
  EXPECT_EQ(refusal({2, 128, 128, 1}, W4Scheme::nvfp4, 32, w), ErrorCode::config) << "group of nvfp4";
  EXPECT_EQ(refusal({2, 192, 192, 1}, W4Scheme::int4, 128, w), ErrorCode::config) << "a group that does not divide";
  EXPECT_EQ(refusal({2, 128, 33, 1}, W4Scheme::int8, 0, w), ErrorCode::internal) << "any intermediate, no groups";
  EXPECT_EQ(refusal({2, 96, 64, 1}, W4Scheme::int8, 0, w), ErrorCode::config) << "hidden of int8";
  EXPECT_EQ(refusal({2, 128, 0, 1}, W4Scheme::int8, 0, w), ErrorCode::config) << "no intermediate";
  EXPECT_EQ(refusal({2000, 128, 128, 1}, W4Scheme::int4, 64, w), ErrorCode::config) << "experts";
  EXPECT_EQ(refusal({2, 128, 128, 0}, W4Scheme::int4, 64, w), ErrorCode::config) << "topk";
  EXPECT_EQ(refusal({2, 128, 128, 1}, W4Scheme::int4, 64), ErrorCode::argument) << "null";
  EXPECT_EQ(refusal({2, 128, 128, 1}, W4Scheme::int4, 64, {memory + 4, memory, memory, memory}), ErrorCode::argument) << "misaligned";
}

/// The value of an e4m3 code.
double e4m3(std::uint32_t code) {
  int const field = static_cast<int>(code >> 3 & 15u);
  double const eighths = static_cast<double>((code & 7u) + (field > 0 ? 8u : 0u));
  return std::ldexp((code & 0x80u) != 0 ? -eighths : eighths, (field > 0 ? field : 1) - 10);
}

TEST(HopperW4A8, CodesAreExactInE4m3) {
  constexpr double kValues[8] = {0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0};
  std::mt19937 gen(2);
  for (int shift = w4a8::kLeastShift; shift <= w4a8::kMostShift; ++shift) {
    w4a8::Magnitudes const m = w4a8::magnitudes(static_cast<std::uint32_t>(shift - w4a8::kLeastShift));
    std::uint64_t const table = std::uint64_t{m.high} << 32 | m.low;
    if (shift >= w4a8::kLeastShift + static_cast<int>(w4a8::kLeastNormal)) {
      w4a8::Magnitudes const normal = w4a8::normal_magnitudes(static_cast<std::uint32_t>(shift - w4a8::kLeastShift));
      EXPECT_EQ(std::uint64_t{normal.high} << 32 | normal.low, table) << shift;
    }
    for (int round = 0; round < 64; ++round) {
      std::uint32_t code[8];
      for (std::uint32_t& c : code) c = gen() & 15u;
      std::uint32_t const word = w4a8::pack_word(code);
      for (int i = 0; i < 8; ++i) {  // as the kernel reads it
        std::uint32_t const magnitude = static_cast<std::uint32_t>(table >> (8 * (word >> (4 * i) & 7u))) & 0xFFu;
        std::uint32_t const sign = (i < 4 ? word : word << 4) & (0x80u << (8 * (i & 3)));
        double const value = std::ldexp(kValues[code[i] & 7u], shift);
        EXPECT_EQ(e4m3(magnitude | (sign != 0 ? 0x80u : 0u)), (code[i] & 8u) != 0 ? -value : value) << shift << ", code " << code[i];
      }
    }
  }
}

TEST(HopperW4A8, Int4CodesLessTheirZeroPointAreExactInE4m3) {
  for (int v = -15; v <= 15; ++v) EXPECT_EQ(e4m3(w4a8::e4m3_of(v)), v);
  std::mt19937 gen(4);
  for (int zero = 0; zero < 16; ++zero) {
    w4a8::Magnitudes const below = w4a8::int4_values(0, zero);
    w4a8::Magnitudes const above = w4a8::int4_values(8, zero);
    for (int round = 0; round < 16; ++round) {
      std::uint32_t code[8];
      for (std::uint32_t& c : code) c = gen() & 15u;
      std::uint32_t const word = w4a8::pack_word(code);
      for (int i = 0; i < 8; ++i) {  // as the kernel reads it
        bool const high = ((i < 4 ? word : word << 4) & (0x80u << (8 * (i & 3)))) != 0;
        w4a8::Magnitudes const m = high ? above : below;
        std::uint64_t const table = std::uint64_t{m.high} << 32 | m.low;
        std::uint32_t const value = static_cast<std::uint32_t>(table >> (8 * (word >> (4 * i) & 7u))) & 0xFFu;
        EXPECT_EQ(e4m3(value), static_cast<int>(code[i]) - zero) << "code " << code[i] << ", zero point " << zero;
      }
    }
  }
}

// As W4A8's packing stores them: over the row's power of two, then over the brick's; the main loop multiplies with the brick's, the
// epilogue with the row's.
TEST(HopperW4A8, Int4ScalesOfRowsFarApartComeBack) {
  std::mt19937 gen(7);
  constexpr std::size_t kBricks = 3;  // along K, of four groups
  std::vector<std::vector<float>> rows;
  std::vector<int> exponents;
  for (int r = 0; r < kBrickRows; ++r) {
    rows.push_back(row_of_scales(4 * kBricks, -100 + 223 * r / kBrickRows, 13, gen));
    exponents.push_back(unit_exponent(largest_of(rows.back())));
    EXPECT_EQ(exponent_of(std::ldexp(1.0F, exponents.back())), exponents.back());
  }
  for (std::size_t brick = 0; brick < kBricks; ++brick) {
    int most = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) {
      for (std::size_t g = 4 * brick; g < 4 * brick + 4; ++g) {
        most = larger_scale(most, std::bit_cast<std::uint32_t>(std::ldexp(rows[r][g], -exponents[r])));
      }
    }
    int const common = wide_exponent(most);
    for (std::size_t r = 0; r < rows.size(); ++r) {
      for (std::size_t g = 4 * brick; g < 4 * brick + 4; ++g) {
        float const stored = to_float(scale_over(std::ldexp(rows[r][g], -exponents[r]), common));
        float const in_the_loop = stored * std::ldexp(1.0F, common);
        EXPECT_LT(std::abs(in_the_loop), 2.0F) << "sums stay near the activations' magnitude";
        EXPECT_EQ(in_the_loop * std::ldexp(1.0F, exponents[r]), rows[r][g]) << "row " << r << ", group " << g;
      }
    }
  }
}

TEST(HopperW4A8, ScalesFoldExactlyOrStayApart) {
  std::mt19937 gen(3);
  int folds = 0;
  int subnormals = 0;
  for (int round = 0; round < 4000; ++round) {
    std::uint32_t exponent[4];
    bool used[4];
    int const first = static_cast<int>(gen() % 253u);
    int const range = round % 2 == 0 ? 15 : 30;
    int most = -1;
    int least = 300;
    for (int g = 0; g < 4; ++g) {
      int const e = std::clamp(first + static_cast<int>(gen()) % range, 0, w4a8::kMostExponent);
      exponent[g] = static_cast<std::uint32_t>(e);
      used[g] = gen() % 8 != 0;
      if (used[g]) {
        most = std::max(most, e);
        least = std::min(least, e);
      }
    }
    w4a8::FoldedScales const folded = w4a8::fold_scales(exponent, used);
    ASSERT_EQ(folded.wide, most - least >= w4a8::kShifts) << most << ", " << least;
    int least_shift = w4a8::kMostShift;
    for (int g = 0; g < 4; ++g) {
      if (!used[g]) continue;
      if (folded.wide) {
        EXPECT_EQ(folded.word >> (8 * g) & 255u, exponent[g]);
        continue;
      }
      ++folds;
      int const shift = static_cast<int>(w4a8::scale_index(folded.word, g)) + w4a8::kLeastShift;
      least_shift = std::min(least_shift, shift);
      EXPECT_LE(shift, w4a8::kMostShift);
      EXPECT_EQ(shift + static_cast<int>(folded.word >> 16), static_cast<int>(exponent[g]));
    }
    if (!folded.wide) {
      bool const subnormal = least_shift < w4a8::kLeastShift + static_cast<int>(w4a8::kLeastNormal);
      EXPECT_EQ(w4a8::has_subnormals(folded.word), subnormal) << least_shift;
      subnormals += subnormal ? 1 : 0;
    }
    EXPECT_EQ(w4a8::wide_scales(exponent, used) >> 8 & 255u, used[1] ? exponent[1] : 0u);
  }
  EXPECT_GT(folds, 1000);
  EXPECT_GT(subnormals, 100);
}

TEST(HopperW4A8, SizesAndRefusals) {
  EXPECT_EQ(w4a8::packed_bytes(W4Scheme::mxfp4, 64, 128), 4096 + 256 + 16) << "4.27 bits a weight";
  EXPECT_EQ(w4a8::packed_bytes(W4Scheme::int4, 64, 128), 4096 + 256 + 16 + 64 * 4) << "a factor for each row";
  EXPECT_EQ(w4a8::packed_bytes(W4Scheme::int4_zero, 64, 256), 2 * (4096 + 512 + 16) + 64 * 4);
  EXPECT_EQ(w4a8::packed_bytes(W4Scheme::int4_32, 64, 128), 4096 + 512 + 16 + 64 * 4);
  EXPECT_EQ(w4a8::packed_bytes(W4Scheme::int4_32_zero, 128, 128), 2 * (4096 + 768 + 16) + 128 * 4);
  EXPECT_EQ(w4a8::bricks_bytes(W4Scheme::int4, 64, 128), 4096 + 256 + 16);
  EXPECT_EQ(w4a8::sums_of(W4Scheme::mxfp4, 32, 32), 1);
  EXPECT_EQ(w4a8::sums_of(W4Scheme::int4, 256, 128), 1);
  EXPECT_EQ(w4a8::sums_of(W4Scheme::int4, 128, 64), 2);
  EXPECT_EQ(w4a8::sums_of(W4Scheme::int4_32_zero, 32, 32), 4);
  hopper::LocalShape const s{2, 2880, 2880, 4};
  auto const bytes = [](hopper::LocalShape const& shape, bool gated) { return W4A8Layer::packed_bytes(shape, W4Scheme::mxfp4, gated); };
  EXPECT_EQ(bytes(s, true) - bytes({0, 2880, 2880, 4}, true), 2 * (92 + 45) * 23 * 4368);
  EXPECT_EQ(bytes(s, false) - bytes({0, 2880, 2880, 4}, false), 2 * (46 + 45) * 23 * 4368);
  for (int tokens : {1, 7, 64, 16384}) {
    W4Workspace const w = w4a8::plan_workspace(s, tokens);
    EXPECT_LE(w.inter + w.slots * (2944 + 4 * w4a8::scale_blocks(2944)), w.slot_rows) << "codes and scales of the intermediate";
    EXPECT_EQ(w4a8::choose_tuning(s, tokens, 80).tile_rows, tokens <= 4 ? 16 : 80) << tokens;  // two rows an expert for each token
  }
  EXPECT_EQ(w4a8::most_tile_rows(W4Scheme::mxfp4, false), 80);
  EXPECT_EQ(w4a8::most_tile_rows(W4Scheme::mxfp4, true), 64);
  EXPECT_EQ(w4a8::most_tile_rows(W4Scheme::int4, false), 64);
  EXPECT_EQ(w4a8::most_tile_rows(W4Scheme::int4_zero, false), 48);
  alignas(16) static std::uint8_t const memory[32] = {};
  W4Weights const w{memory, memory, memory, memory};
  auto const refused = [&](hopper::LocalShape const& shape, W4Weights const& weights, W4Scheme scheme = W4Scheme::mxfp4) {
    try {
      w4a8::check(shape, scheme, weights);
    } catch (Error const& e) {
      return e.code();
    }
    return ErrorCode::internal;
  };
  EXPECT_EQ(refused({2, 64, 32, 1}, w), ErrorCode::internal) << "fits";
  EXPECT_EQ(refused({2, 96, 32, 1}, w), ErrorCode::config) << "hidden";
  EXPECT_EQ(refused({2, 64, 48, 1}, w), ErrorCode::config) << "intermediate";
  EXPECT_EQ(refused({0, 64, 32, 1}, w), ErrorCode::config) << "experts";
  EXPECT_EQ(refused({2, 64, 32, 0}, w), ErrorCode::config) << "topk";
  EXPECT_EQ(refused({2, 64, 32, 1}, {}), ErrorCode::argument) << "null";
  W4Weights const groups{memory, memory, memory, memory, 128, 128};
  EXPECT_EQ(refused({2, 128, 128, 1}, groups, W4Scheme::int4), ErrorCode::internal) << "fits";
  EXPECT_EQ(refused({2, 128, 96, 1}, groups, W4Scheme::int4), ErrorCode::config) << "intermediate";
  EXPECT_EQ(refused({2, 128, 128, 1}, w, W4Scheme::int4), ErrorCode::config) << "groups of 32";
  EXPECT_EQ(refused({2, 128, 128, 1}, w, W4Scheme::int4_32), ErrorCode::internal) << "fits";
  EXPECT_EQ(refused({2, 128, 128, 1}, w, W4Scheme::nvfp4), ErrorCode::config) << "no kernels";
  EXPECT_EQ(refused({2, 128, 128, 1}, w, W4Scheme::int8), ErrorCode::config) << "no kernels";
}

}  // namespace
