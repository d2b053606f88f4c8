// SPDX-License-Identifier: Apache-2.0
// tests/mpi/exchange_harness.hpp: an exchange between processes in the host space, with the batches of tests/exchange_batch.hpp.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/naive.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/core/buffer.hpp"
#include "moe/quantization/none.hpp"
#include "tests/exchange_batch.hpp"

namespace moe_test {

using Comm = moe::comm::Mpi;
using NaiveBackend = moe::backends::Naive<Comm>;
using GatherBackend = moe::backends::AllGatherReduceScatter<Comm>;
using AllToAllBackend = moe::backends::AllToAllV<Comm>;

/// The experts of the tests on standard rows: each row of `y` is its row times the sum of weight and factor() of its experts, which are
/// numbers in `owned`, the physical ids of this rank. Returns how many slots had work. `row`: scratch.
template <class Quant, class Act, class Partial, class Tokens, class Outputs, class Owned>
std::int64_t run_standard_experts(Tokens const& tokens, Outputs const& y, Owned const& owned, std::int64_t hidden,
                                  std::vector<float>& row) {
  EXPECT_EQ(y.extent(0), tokens.rows.extent(0));
  row.resize(static_cast<std::size_t>(hidden));
  std::int64_t slots = 0;
  for (std::int64_t t = 0; t < y.extent(0); ++t) {
    float sum = 0;
    for (std::int64_t j = 0; j < tokens.topk_ids.extent(1); ++j) {
      std::int32_t const id = tokens.topk_ids(t, j);
      if (id == moe::kNoExpert) continue;
      EXPECT_TRUE(id >= 0 && id < static_cast<std::int32_t>(owned.size())) << id;
      sum += tokens.topk_weights(t, j) * factor(owned[static_cast<std::size_t>(id)]);
      ++slots;
    }
    Quant{}.template dequantize_row<Act>(moe::row_ptr(tokens.rows, t), moe::row_ptr(tokens.scales, t), hidden, row.data());
    for (std::int64_t h = 0; h < hidden; ++h) y(t, h) = moe::from_float<Partial>(sum * row[static_cast<std::size_t>(h)]);
  }
  return slots;
}

template <class Backend, class Act = float, class Quant = moe::quantization::None, class Partial = float, class Cfg = Config<Act>>
class Harness {
 public:
  using Exchange = typename Backend::template Exchange<Cfg, Quant, Partial>;
  static_assert(moe::PrepareAndFinalize<Backend>);
  static_assert(moe::ExchangeOf<Exchange, Cfg>);

  struct Setup {
    std::int64_t hidden = 32;
    int num_experts = 7;
    int k = 3;
    std::int64_t max_tokens = 8;
    moe::PlacementStrategy strategy = moe::PlacementStrategy::linear;
    std::int64_t max_recv_rows = 0;
    std::optional<moe::ExpertPlacement> placement{};
  };

  Harness(Comm& comm, Setup const& s)
      : comm_(comm),
        hidden_(s.hidden),
        num_experts_(s.num_experts),
        placement_(s.placement ? *s.placement : moe::ExpertPlacement(s.num_experts, comm.size(), s.strategy, true)),
        exchange_(comm, moe::Shape<Cfg>({s.hidden, 8, s.num_experts, s.k}), s.max_tokens, placement_, Quant{}, params(s), arena_) {
    arena_.seal();
  }

  Exchange& exchange() { return exchange_; }
  std::size_t arena_bytes() const { return arena_.bytes(); }
  moe::ExpertPlacement const& placement() const { return placement_; }

  /// Runs this rank's experts on the result of prepare(); returns how many slots had work.
  template <class Tokens>
  std::int64_t run_experts(Tokens const& tokens) {
    auto y = exchange_.expert_output();
    EXPECT_LE(y.extent(0), exchange_.max_rows());
    return run_standard_experts<Quant, Act, Partial>(tokens, y, placement_.local_to_physical(comm_.rank()), hidden_, row_);
  }

  /// prepare, experts, finalize: [rows, hidden].
  std::vector<Act> forward(Batch<Act> const& b) {
    std::vector<Act> out(b.x.size(), moe::from_float<Act>(-77.0F));
    auto const tokens = exchange_.prepare(cast(b.tokens()), {});
    slots_ = run_experts(tokens);
    exchange_.finalize(moe::make_rows<Cfg::hidden>(out.data(), b.rows, b.hidden), {});
    return out;
  }
  /// Runs forward() and compares with the expected outputs; every rank knows every rank's batch.
  void check(Batch<Act> const& b, std::string const& what = "") {
    std::vector<Act> const out = forward(b);
    for (std::int64_t t = 0; t < b.rows; ++t) {
      for (std::int64_t h = 0; h < b.hidden; ++h) {
        ASSERT_EQ(moe::to_float(out[static_cast<std::size_t>(t * b.hidden + h)]), b.expected(t, h, num_experts_))
            << what << " token " << t << " column " << h;
      }
    }
  }
  /// Slots with work on this rank in the last forward().
  std::int64_t slots() const { return slots_; }

  static moe::RoutedTokens<Act, Cfg::hidden> cast(moe::RoutedTokens<Act> const& in) {
    return {moe::make_strided_rows<Cfg::hidden>(in.hidden.data_handle(), in.hidden.extent(0), in.hidden.extent(1), in.hidden.stride(0)),
            in.topk_ids, in.topk_weights};
  }

 private:
  static typename Backend::Params params(Setup const& s) {
    typename Backend::Params p{};
    if constexpr (requires { p.max_recv_rows; }) p.max_recv_rows = s.max_recv_rows;
    return p;
  }
  Comm& comm_;
  std::int64_t hidden_;
  int num_experts_;
  moe::ExpertPlacement placement_;
  moe::Arena<moe::space::host> arena_;
  Exchange exchange_;
  std::vector<float> row_;
  std::int64_t slots_ = 0;
};

/// T3: each rank in turn is the owner of all slots with work, then of none. `h`: three experts a token, rows of 16.
template <class H>
void expect_one_rank_takes_all_or_none(H& h, int rank, int ranks, int num_experts) {
  for (int target = 0; target < ranks; ++target) {
    auto one = random_batch<float>(rank, 5, 8, 16, 3, num_experts);
    auto empty = one;
    auto const owned = h.placement().local_to_physical(target);
    for (std::size_t i = 0; i < one.ids.size(); ++i) {
      one.ids[i] = owned[i % owned.size()];
      if (empty.ids[i] >= 0 && h.placement().owner(empty.ids[i]) == target) empty.ids[i] = moe::kNoExpert;
    }
    h.check(one, "one rank takes all");
    EXPECT_EQ(h.slots(), rank == target ? 8 * 3 * ranks : 0);
    h.check(empty, "one rank takes none");
    if (rank == target) {
      EXPECT_EQ(h.slots(), 0);
    }
  }
}
/// T3, T19: each expert in turn is named by all slots.
template <class H>
void expect_one_expert_takes_all(H& h, int rank, std::int64_t rows, std::int64_t k, int num_experts) {
  for (int expert = 0; expert < num_experts; ++expert) {
    auto b = random_batch<float>(rank, expert, rows, 16, k, num_experts);
    std::fill(b.ids.begin(), b.ids.end(), expert);
    h.check(b, "the same id several times is added several times");
  }
}

/// The last rank's prepare() with `wrong` is refused with `own` and `sentence`; the other ranks, whose tokens are good, get `others` and
/// the name of the refusing rank. Afterwards a round with good tokens passes. `H`: Harness or WindowHarness.
template <class H, class Batch>
void expect_prepare_refused(H& h, Comm const& comm, Batch const& good, moe::RoutedTokens<float> const& wrong, moe::ErrorCode own,
                            moe::ErrorCode others, std::string const& sentence) {
  int const last = comm.size() - 1;
  bool const errs = comm.rank() == last;
  std::string const message = expect_error(errs ? own : others, [&] { h.exchange().prepare(errs ? wrong : good.tokens(), {}); });
  if (errs) {
    EXPECT_EQ(message, sentence);
  } else {
    EXPECT_EQ(message.find(moe::text("rank ", last, " refused its arguments with ", moe::name(own))), 0U) << message;
  }
  h.check(good, "after " + sentence);
}

}  // namespace moe_test
