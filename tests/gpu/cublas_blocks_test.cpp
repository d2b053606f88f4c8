// SPDX-License-Identifier: Apache-2.0
// tests/gpu/cublas_blocks_test.cpp: every block file of the reference data through cuBLAS, in float32 and bf16, against the expected
// output.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "block_file.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/experts/cublas_grouped.hpp"
#include "moe/quantization/none.hpp"

namespace {

using namespace moe;
using Local = backends::NoExpertParallel<space::cuda>;
using moe_test::BlockFile;
using moe_test::each_block_file_of;

TEST(CublasBlocks, Float32EqualsExpected) {
  each_block_file_of<experts::CublasGrouped>([](BlockFile const& f) {
    auto const got = f.run<quantization::None, Local, experts::CublasGrouped, float>();
    double largest = 0;
    for (float v : f.expected) largest = std::max(largest, std::abs(static_cast<double>(v)));
    for (std::size_t i = 0; i < got.size(); ++i) {  // the tolerance of the reference data
      ASSERT_NEAR(got[i], f.expected[i], 5e-6 * largest + 1e-5 * std::abs(f.expected[i])) << "at " << i;
    }
  });
}
TEST(CublasBlocks, Bf16EqualsExpected) {
  each_block_file_of<experts::CublasGrouped>([](BlockFile const& f) {
    EXPECT_LT(moe_test::relative_error(f.run<quantization::None, Local, experts::CublasGrouped, bf16>(), f.expected), 1.2e-2);
  });
}
/// Muse-Spark: there is no norm between the second product and the weighted sum.
TEST(CublasBlocks, ANormOfOutputsIsRefused) {
  moe_test::expect_norm_refused<quantization::None, Local, experts::CublasGrouped, float>();
  moe_test::expect_norm_refused<quantization::None, Local, experts::CublasGrouped, bf16>();
}

}  // namespace
