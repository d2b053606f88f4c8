// SPDX-License-Identifier: Apache-2.0
// tests/unit/backend_one_rank_test.cpp: the exchanges between ranks also run over the communicator of one, in a release build too.
#ifndef NDEBUG
#define NDEBUG  // ids out of range become kNoExpert
#endif
#include <gtest/gtest.h>

#include <vector>

#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/naive.hpp"
#include "moe/comm/self.hpp"
#include "moe/core/buffer.hpp"
#include "moe/quantization/none.hpp"

namespace {

struct AnyActivation {};
struct Config : moe::LayerDefaults {
  using Activation = AnyActivation;
};
using Comm = moe::comm::Self<>;

template <class Backend>
class OneRank : public testing::Test {};
using Backends = testing::Types<moe::backends::Naive<Comm>, moe::backends::AllGatherReduceScatter<Comm>, moe::backends::AllToAllV<Comm>>;
TYPED_TEST_SUITE(OneRank, Backends);

TYPED_TEST(OneRank, T1_G3_BadIdsCountAsNoneInRelease) {
  static_assert(moe::PrepareAndFinalize<TypeParam>);
  Comm comm;
  moe::Arena<moe::space::host> arena;
  typename TypeParam::template Exchange<Config, moe::quantization::None, float> exchange(comm, moe::Shape<Config>({2, 2, 8, 2}), 4,
                                                                                         moe::ExpertPlacement(8, 1), {}, {}, arena);
  std::vector<float> const x{1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<float> const weights{1, 10, 1, 10, 1, 10, 1, 10};
  std::vector<std::int32_t> const ids{7, 8, -1, -2, 1 << 30, 0, 3, 3};
  std::vector<float> const factors{1, 0, 10, 11};
  for (int round = 0; round < 3; ++round) {
    auto const tokens =
        exchange.prepare({moe::make_rows(x.data(), 4, 2), moe::make_rows(ids.data(), 4, 2), moe::make_rows(weights.data(), 4, 2)}, {});
    auto y = exchange.expert_output();
    for (std::int64_t t = 0; t < y.extent(0); ++t) {
      float sum = 0;
      for (int j = 0; j < 2; ++j) sum += tokens.topk_ids(t, j) == -1 ? 0 : tokens.topk_weights(t, j);
      for (int h = 0; h < 2; ++h) y(t, h) = sum * tokens.rows(t, h);
    }
    std::vector<float> out(8, -1);
    exchange.finalize(moe::make_rows(out.data(), 4, 2), {});
    for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(out[i], factors[i / 2] * x[i]) << i;
  }
}

TYPED_TEST(OneRank, ZeroCapacity) {
  Comm comm;
  moe::Arena<moe::space::host> arena;
  typename TypeParam::template Exchange<Config, moe::quantization::None, float> exchange(comm, moe::Shape<Config>({2, 2, 8, 2}), 0,
                                                                                         moe::ExpertPlacement(8, 1), {}, {}, arena);
  EXPECT_EQ(exchange.max_rows(), 0);
  auto const none = [](auto const* p, std::int64_t cols) { return moe::make_rows(p, 0, cols); };
  exchange.prepare({none(static_cast<float const*>(nullptr), 2), none(static_cast<std::int32_t const*>(nullptr), 2),
                    none(static_cast<float const*>(nullptr), 2)},
                   {});
  exchange.finalize(moe::make_rows(static_cast<float*>(nullptr), 0, 2), {});
}

}  // namespace
