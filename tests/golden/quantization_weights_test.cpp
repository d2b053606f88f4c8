// SPDX-License-Identifier: Apache-2.0
// tests/golden/quantization_weights_test.cpp: weight matrices per block, channel and group, bit for bit.
#include "moe/quantization/int8_per_channel.hpp"

#include <gtest/gtest.h>

#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_channel.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int8_per_token.hpp"
#include "quantization_golden.hpp"

namespace {

using namespace moe::quantization;
using moe_test::quant_file;
using moe_test::QuantizedWeight;
using moe_test::same_bits;

template <class Scheme>
void compare(std::string const& name, std::string const& prefix, std::int64_t rows, std::int64_t cols) {
  SCOPED_TRACE(prefix);
  if (!moe_test::has_quant_file(name)) GTEST_SKIP() << name << " is only in the whole reference set";
  auto const file = quant_file(name);
  QuantizedWeight<Scheme> const got(Scheme{}, file.read<float>("w"), rows, cols);
  EXPECT_TRUE(same_bits(got.q, file.read<typename QuantizedWeight<Scheme>::Code>(prefix + ".q")));
  if constexpr (std::is_same_v<typename Scheme::WeightScale, float>) {
    EXPECT_TRUE(same_bits(got.scale, file.read<float>(prefix + ".scale")));
  } else {
    EXPECT_TRUE(same_bits(got.scale, file.read<std::uint8_t>(prefix + ".scale_byte")));
  }
  EXPECT_TRUE(same_bits(got.dq, file.read<float>(prefix + ".dq")));
}

TEST(QuantizationWeights, Fp8BlockWholeBlocks) {
  compare<Fp8Block<128>>("weight_fp8_block_256x512_seed2011", "block128", 256, 512);
  compare<Fp8Block<128, ScaleFormat::ue8m0>>("weight_fp8_block_256x512_seed2011", "block128_ue8m0", 256, 512);
  compare<Fp8Block<128, ScaleFormat::f32_pow2>>("weight_fp8_block_256x512_seed2011", "block128_ue8m0", 256, 512);
}

TEST(QuantizationWeights, Fp8BlockPartialBlocksAtTheEdge) {
  compare<Fp8Block<128>>("weight_fp8_int8_200x300_seed2013", "block128", 200, 300);
  compare<Fp8Block<128, ScaleFormat::ue8m0>>("weight_fp8_int8_200x300_seed2013", "block128_ue8m0", 200, 300);
}

TEST(QuantizationWeights, PerChannel) {
  compare<Fp8PerToken<>>("weight_fp8_int8_200x300_seed2013", "fp8_per_channel", 200, 300);
  compare<Fp8PerChannel<>>("weight_fp8_int8_200x300_seed2013", "fp8_per_channel", 200, 300);
  compare<Int8PerToken>("weight_fp8_int8_200x300_seed2013", "int8_per_channel", 200, 300);
  compare<Int8PerChannel>("weight_fp8_int8_200x300_seed2013", "int8_per_channel", 200, 300);
}

}  // namespace
