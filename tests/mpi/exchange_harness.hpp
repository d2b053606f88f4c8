// SPDX-License-Identifier: Apache-2.0
// tests/mpi/exchange_harness.hpp: an exchange between processes, the tokens of every rank, and experts whose result is known: expert p
// multiplies a row by factor(p). Values are small multiples of powers of two, so that all sums are exact in float32.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/naive.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/core/buffer.hpp"
#include "moe/quantization/none.hpp"

namespace moe_test {

struct AnyActivation {};
template <class T, int Hidden = moe::dynamic>
struct Config : moe::LayerDefaults {
  static constexpr int hidden = Hidden;
  using Act = T;
  using Activation = AnyActivation;
};

using Comm = moe::comm::Mpi;
using NaiveBackend = moe::backends::Naive<Comm>;
using GatherBackend = moe::backends::AllGatherReduceScatter<Comm>;
using AllToAllBackend = moe::backends::AllToAllV<Comm>;

/// What expert p does to a row.
inline float factor(int p) { return 1.0F + 0.25F * static_cast<float>(p % 16); }

/// The tokens of one rank.
template <class Act>
struct Batch {
  std::int64_t rows = 0, hidden = 0, k = 0;
  std::vector<Act> x;             // [rows, hidden]
  std::vector<std::int32_t> ids;  // [rows, k]
  std::vector<float> weights;     // [rows, k]

  Batch(std::int64_t rows_, std::int64_t hidden_, std::int64_t k_) : rows(rows_), hidden(hidden_), k(k_) {
    x.resize(static_cast<std::size_t>(rows * hidden));
    ids.resize(static_cast<std::size_t>(rows * k));
    weights.resize(static_cast<std::size_t>(rows * k));
  }
  moe::RoutedTokens<Act> tokens() const {
    return {moe::make_rows(x.data(), rows, hidden), moe::make_rows(ids.data(), rows, k), moe::make_rows(weights.data(), rows, k)};
  }
  /// Σ_j w_j factor(id_j) x, rounded once.
  float expected(std::int64_t t, std::int64_t h, int num_experts) const {
    float sum = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      int const id = ids[static_cast<std::size_t>(t * k + j)];
      sum += id >= 0 && id < num_experts ? weights[static_cast<std::size_t>(t * k + j)] * factor(id) : 0.0F;
    }
    return moe::to_float(moe::from_float<Act>(sum * moe::to_float(x[static_cast<std::size_t>(t * hidden + h)])));
  }
};

/// A batch that every rank can make for any rank. `exact`: sums of its values have no rounding. Ids are in [-1, num_experts).
template <class Act>
Batch<Act> random_batch(int rank, int round, std::int64_t rows, std::int64_t hidden, std::int64_t k, int num_experts, bool exact = true) {
  std::mt19937 gen(static_cast<unsigned>(rank * 7919 + round * 104729 + 1));
  Batch<Act> b(rows, hidden, k);
  auto real = [&] { return static_cast<float>(gen()) / 2147483648.0F - 1.0F; };
  auto integer = [&](unsigned n) { return static_cast<float>(gen() % n); };
  for (auto& v : b.x) v = moe::from_float<Act>(exact ? integer(17) - 8.0F : real());
  for (auto& v : b.weights) v = exact ? integer(17) / 16.0F : real();
  for (auto& v : b.ids) v = static_cast<std::int32_t>(gen() % static_cast<unsigned>(num_experts + 1)) - 1;
  return b;
}

/// Rows that `rank` brings in `round`: anything from 0 to max_tokens, often the ends.
inline std::int64_t random_rows(int rank, int round, std::int64_t max_tokens) {
  std::mt19937 gen(static_cast<unsigned>(rank * 31 + round * 1009 + 17));
  unsigned const kind = gen() % 6;
  return kind == 0 ? 0 : kind == 1 ? max_tokens : static_cast<std::int64_t>(gen() % static_cast<unsigned>(max_tokens + 1));
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

  /// The experts of this rank over what prepare() gave; returns how many slots had work.
  template <class Tokens>
  std::int64_t run_experts(Tokens const& tokens) {
    auto y = exchange_.expert_output();
    EXPECT_EQ(y.extent(0), tokens.rows.extent(0));
    EXPECT_LE(y.extent(0), exchange_.max_rows());
    auto const owned = placement_.local_to_physical(comm_.rank());
    std::int64_t slots = 0;
    row_.resize(static_cast<std::size_t>(hidden_));
    for (std::int64_t t = 0; t < y.extent(0); ++t) {
      float sum = 0;
      for (std::int64_t j = 0; j < tokens.topk_ids.extent(1); ++j) {
        std::int32_t const id = tokens.topk_ids(t, j);
        if (id == moe::kNoExpert) continue;
        EXPECT_TRUE(id >= 0 && id < static_cast<std::int32_t>(owned.size())) << id;
        sum += tokens.topk_weights(t, j) * factor(owned[static_cast<std::size_t>(id)]);
        ++slots;
      }
      Quant{}.template dequantize_row<Act>(moe::row_ptr(tokens.rows, t), moe::row_ptr(tokens.scales, t), hidden_, row_.data());
      for (std::int64_t h = 0; h < hidden_; ++h) y(t, h) = moe::from_float<Partial>(sum * row_[static_cast<std::size_t>(h)]);
    }
    return slots;
  }

  /// prepare, experts, finalize: [rows, hidden].
  std::vector<Act> forward(Batch<Act> const& b) {
    std::vector<Act> out(b.x.size(), moe::from_float<Act>(-77.0F));
    auto const tokens = exchange_.prepare(cast(b.tokens()), {});
    slots_ = run_experts(tokens);
    exchange_.finalize(moe::make_rows<Cfg::hidden>(out.data(), b.rows, b.hidden), {});
    return out;
  }
  /// forward() and a comparison with what identity experts give; every rank knows every rank's batch.
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
    return {moe::make_rows<Cfg::hidden>(in.hidden.data_handle(), in.hidden.extent(0), in.hidden.extent(1), in.hidden.stride(0)),
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

/// Calls f and returns the error that it threw.
template <class F>
std::optional<moe::Error> error_of(F&& f) {
  try {
    f();
  } catch (moe::Error const& e) {
    return e;
  }
  return std::nullopt;
}

/// f must throw an error of that code; its message.
template <class F>
std::string expect_error(moe::ErrorCode code, F&& f) {
  auto const e = error_of(f);
  EXPECT_TRUE(e.has_value()) << "no error, expected " << moe::name(code);
  if (!e) return "";
  EXPECT_EQ(moe::name(e->code()), moe::name(code)) << e->what();
  return e->message();
}

}  // namespace moe_test
