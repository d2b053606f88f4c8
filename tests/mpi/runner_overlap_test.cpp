// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_overlap_test.cpp: shared experts beside an exchange give the bits of shared experts before the layer, also where the
// output is the input (N7): the routed path then must not write rows that the shared experts still read.
// moe-ranks: 2
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "runner_grid_test/harness.hpp"

namespace {

using namespace moe_test::grid;

/// The stages of a forward in the order in which they begin.
struct Stages : NoProbe {
  std::vector<Phase> begun;
  void begin(Phase phase) { begun.push_back(phase); }
  /// Whether the shared experts begin after the dispatch has.
  bool shared_after_dispatch() const {
    auto const first = [&](Phase phase) { return std::find(begun.begin(), begun.end(), phase); };
    return first(Phase::shared) > first(Phase::dispatch);
  }
};

template <class Backend>
class Overlap : public testing::Test {
 protected:
  using One = Rank<Backend, experts::Reference<float>>;
  /// The output, written over the input or beside it.
  static std::vector<float> forward(One& rank, std::vector<float> x, bool in_place, Stages& stages) {
    std::vector<float> beside(x.size(), -1.0F);
    std::vector<float>& out = in_place ? x : beside;
    auto const rows = static_cast<std::int64_t>(x.size()) / kHidden;
    rank.runner.forward(make_rows(static_cast<float const*>(x.data()), rows, kHidden), make_rows(out.data(), rows, kHidden), {}, {},
                        stages);
    return out;
  }
};
using Backends = testing::Types<backends::AllToAllV<comm::Mpi>, backends::LowLatency<comm::MpiShared>,
                                backends::LowLatencyRankMajor<comm::MpiShared>, backends::HighThroughput<comm::MpiShared>>;
TYPED_TEST_SUITE(Overlap, Backends);

TYPED_TEST(Overlap, N7_InPlaceKeepsTheBits) {
  using One = typename TestFixture::One;
  for (Grid const& grid : {Grid{1, 2, 1, true}, Grid{2, 1, 1, true}}) {
    SCOPED_TRACE(text("tp ", grid.tp));
    Model const overlapped{.form = {false, false, SharedOutput::partial}};
    Model const before{.form = {false, false, SharedOutput::partial, true, false}};
    One with(grid, overlapped, world_rank()), without(grid, before, world_rank());
    std::vector<float> const x = tokens(with.moe);
    Stages late, early;
    std::vector<float> const want = this->forward(without, x, false, early);
    EXPECT_FALSE(early.shared_after_dispatch());
    for (bool in_place : {false, true}) {
      EXPECT_EQ(this->forward(with, x, in_place, late), want) << "in place " << in_place;
      EXPECT_EQ(this->forward(without, x, in_place, early), want) << "in place " << in_place;
    }
    EXPECT_EQ(with.forward_routed(x, late), want) << "with its own routing, as a caller gives it";
    EXPECT_EQ(without.forward_routed(x, early), want);
    EXPECT_EQ(late.shared_after_dispatch(), runner::detail::kInHalves<typename One::R::Layer>) << "beside the exchange where it has halves";
  }
}

}  // namespace
