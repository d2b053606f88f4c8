// SPDX-License-Identifier: Apache-2.0
// tests/unit/backend_one_rank_test.cpp: the exchanges between ranks also run over the communicator of one, in a release build too, and over
// the archetypes of communicators and windows.
#ifndef NDEBUG
#define NDEBUG  // ids out of range become kNoExpert
#endif
#include <gtest/gtest.h>

#include <vector>

#include "moe/archetypes.hpp"
#include "moe/archetypes/window.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/naive.hpp"
#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/one_sided.hpp"
#include "moe/backends/window/host/two_sided.hpp"
#include "moe/comm/self.hpp"
#include "moe/core/buffer.hpp"
#include "moe/quantization/none.hpp"

namespace {

struct AnyActivation {};
struct Config : moe::LayerDefaults {
  using Activation = AnyActivation;
};
using Comm = moe::comm::Self<>;
using moe::archetypes::ArchetypeCommunicator;
using moe::archetypes::StatedWindow;

/// Counts its transfers.
struct CountingCommunicator : moe::archetypes::StatedCommunicator {
  void start_all_to_all_v(Transfer& transfer, void const* in, std::int64_t const* in_counts, std::int64_t const* in_offsets, void* out,
                          std::int64_t const* out_counts, std::int64_t const* out_offsets) {
    ++started;
    StatedCommunicator::start_all_to_all_v(transfer, in, in_counts, in_offsets, out, out_counts, out_offsets);
  }
  void finish(Transfer&) { ++finished; }
  void reserve_reduction(std::int64_t n) { reserved = n; }
  void set_phase(char const*) { ++phases; }
  std::int64_t reserved = 0;
  int started = 0, finished = 0, phases = 0;
};

template <class Backend>
class OneRank : public testing::Test {};
using Backends = testing::Types<moe::backends::Naive<Comm>, moe::backends::AllGatherReduceScatter<Comm>, moe::backends::AllToAllV<Comm>,
                                moe::backends::Naive<ArchetypeCommunicator>, moe::backends::AllGatherReduceScatter<ArchetypeCommunicator>,
                                moe::backends::AllToAllV<ArchetypeCommunicator>, moe::backends::OneSided<StatedWindow>,
                                moe::backends::TwoSided<StatedWindow>, moe::backends::HighThroughput<StatedWindow>>;
TYPED_TEST_SUITE(OneRank, Backends);

TYPED_TEST(OneRank, T1_G3_BadIdsCountAsNoneInRelease) {
  static_assert(moe::PrepareAndFinalize<TypeParam>);
  typename TypeParam::Comm comm;
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
  typename TypeParam::Comm comm;
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

// An exchange uses what its communicator has beyond its concept.
TEST(StatedCommunicator, ItsOptionalMembersAreUsed) {
  CountingCommunicator comm;
  moe::Arena<moe::space::host> arena;
  moe::Shape<Config> const shape({2, 2, 8, 2});
  moe::ExpertPlacement const placement(8, 1);
  using AllToAllV = moe::backends::AllToAllV<CountingCommunicator>::Exchange<Config, moe::quantization::None, float>;
  AllToAllV exchange(comm, shape, 4, placement, {}, {}, arena);
  EXPECT_GT(comm.phases, 0);
  std::vector<float> const x{1, 2}, weights{1, 1};
  std::vector<std::int32_t> const ids{7, 0};
  exchange.prepare_send({moe::make_rows(x.data(), 1, 2), moe::make_rows(ids.data(), 1, 2), moe::make_rows(weights.data(), 1, 2)}, {});
  EXPECT_EQ(comm.started, 1);
  EXPECT_EQ(comm.finished, 0);
  exchange.prepare_receive({});
  EXPECT_EQ(comm.finished, 1);
  exchange.abandon({});

  EXPECT_EQ(comm.reserved, 0);
  using Gather = moe::backends::AllGatherReduceScatter<CountingCommunicator>::Exchange<Config, moe::quantization::None, float>;
  Gather const gather(comm, shape, 4, placement, {}, {}, arena);
  EXPECT_EQ(comm.reserved, 4 * 2);
}

// What is left to the window's type: where it lies, how long it waits.
TEST(StatedWindow, ModelsTheContract) {
  static_assert(moe::ExchangeWindow<StatedWindow> && moe::SymmetricMemory<moe::archetypes::ArchetypeWindow>);
  static_assert(!moe::ExchangeWindow<moe::archetypes::ArchetypeWindow>);
  static_assert(moe::Communicator<ArchetypeCommunicator> && moe::Communicator<CountingCommunicator>);
  static_assert(moe::facts::has_window<moe::backends::OneSided<StatedWindow>>());
  StatedWindow::Comm comm;
  StatedWindow const window(comm, 8, {});
  EXPECT_EQ(window.bytes(), static_cast<std::int64_t>(moe::comm::kWindowControlBytes) + 8);
  moe::archetypes::ArchetypeWindow const plain(8);
  *static_cast<char*>(plain.peer(0, 7)) = 3;
  EXPECT_EQ(*static_cast<char const*>(plain.peer(0, 7)), 3);
}

}  // namespace
