// SPDX-License-Identifier: Apache-2.0
// tests/unit/backend_ids_release_test.cpp: expert ids out of range in a release build, independent of this tree's build type.
#ifndef NDEBUG
#define NDEBUG
#endif
#include <gtest/gtest.h>

#include <array>

#include "moe/backends/no_expert_parallel.hpp"
#include "moe/quantization/none.hpp"

namespace {

struct AnyActivation {};
struct Config : moe::LayerDefaults {
  using Activation = AnyActivation;
};

TEST(BackendIds, G3_OutOfRangeCountsAsNoExpertInRelease) {
  moe::comm::Self<> comm;
  moe::Arena<moe::space::host> arena;
  using Exchange = moe::backends::NoExpertParallel<>::Exchange<Config, moe::quantization::None, float>;
  Exchange exchange(comm, moe::Shape<Config>({2, 2, 8, 2}), 3, moe::ExpertPlacement(8, 1), {}, {}, arena);
  std::array<float, 6> const x{};
  std::array<float, 6> const weights{};
  std::array<std::int32_t, 6> const ids{7, 8, -1, -2, 1 << 30, 0};
  auto const tokens =
      exchange.prepare({moe::make_rows(x.data(), 3, 2), moe::make_rows(ids.data(), 3, 2), moe::make_rows(weights.data(), 3, 2)}, {});
  std::array<std::int32_t, 6> const expected{7, -1, -1, -1, -1, 0};
  for (std::size_t i = 0; i < 6; ++i) EXPECT_EQ(tokens.topk_ids(i / 2, i % 2), expected[i]) << i;
}

}  // namespace
