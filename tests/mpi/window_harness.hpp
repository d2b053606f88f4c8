// SPDX-License-Identifier: Apache-2.0
// tests/mpi/window_harness.hpp: an exchange over a host window between processes, either format, with the tokens and experts of
// exchange_harness.hpp.
#pragma once

#include "exchange_harness.hpp"
#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/backends/window/host/one_sided.hpp"
#include "moe/backends/window/host/pplx.hpp"
#include "moe/backends/window/host/two_sided.hpp"
#include "moe/comm/mpi_shared.hpp"

namespace moe_test {

using Window = moe::comm::MpiShared;

// A case of the typed tests: a backend and its parameters.
struct LowLatencyCase {
  using Backend = moe::backends::LowLatency<Window>;
  static constexpr char const* kName = "low_latency";
  static Backend::Params params() { return {}; }
};
struct DeduplicatedCase {
  using Backend = moe::backends::LowLatency<Window>;
  static constexpr char const* kName = "low_latency_deduplicated";
  static Backend::Params params() { return {.deduplicate = true}; }
};
struct HighThroughputCase {
  using Backend = moe::backends::HighThroughput<Window>;
  static constexpr char const* kName = "high_throughput";
  static Backend::Params params() { return {}; }
};
struct OneSidedCase {
  using Backend = moe::backends::OneSided<Window>;
  static constexpr char const* kName = "one_sided";
  static Backend::Params params() { return {}; }
};
struct TwoSidedCase {  // queues so short that they wrap several times in every round
  using Backend = moe::backends::TwoSided<Window>;
  static constexpr char const* kName = "two_sided";
  static Backend::Params params() { return {.queue_depth = 2, .queue_entry_bytes = 34 * 1024}; }
};
struct PplxCase {
  using Backend = moe::backends::Pplx<Window>;
  static constexpr char const* kName = "pplx";
  static Backend::Params params() { return {}; }
};
struct CaseNames {
  template <class Case>
  static std::string GetName(int) {
    return Case::kName;
  }
};

template <class Case, class Act = float, class Quant = moe::quantization::None, class Partial = float, class Cfg = Config<Act>>
class WindowHarness {
 public:
  using Backend = typename Case::Backend;
  using Exchange = typename Backend::template Exchange<Cfg, Quant, Partial>;
  using Params = typename Backend::Params;
  static constexpr bool kBatched = Backend::kFormat == moe::ActivationFormat::batched;
  static_assert(moe::PrepareAndFinalize<Backend>);
  static_assert(moe::ExchangeOf<Exchange, Cfg>);

  struct Setup {
    std::int64_t hidden = 32;
    int num_experts = 12;
    int k = 3;
    std::int64_t max_tokens = 8;
    moe::PlacementStrategy strategy = moe::PlacementStrategy::linear;
    bool on_input = false;
    Params params = patient();
    std::optional<moe::ExpertPlacement> placement{};
  };
  static Params patient() { return Case::params(); }

  template <class AnyComm>
  WindowHarness(AnyComm& comm, Setup const& s)
      : rank_(comm.rank()),
        hidden_(s.hidden),
        num_experts_(s.num_experts),
        on_input_(s.on_input),
        placement_(s.placement ? *s.placement : moe::ExpertPlacement(s.num_experts, comm.size(), s.strategy, true)),
        exchange_(comm, moe::Shape<Cfg>({s.hidden, 8, s.num_experts, s.k, s.on_input}), s.max_tokens, placement_, Quant{}, s.params,
                  arena_) {
    arena_.seal();
  }

  Exchange& exchange() { return exchange_; }
  moe::ExpertPlacement const& placement() const { return placement_; }
  std::size_t arena_bytes() const { return arena_.bytes(); }

  /// Runs this rank's experts from `tokens` to `y`; returns how many rows (batched) or slots (standard) had work.
  template <class Tokens, class Outputs>
  std::int64_t run_experts(Tokens const& tokens, Outputs y) {
    auto const owned = placement_.local_to_physical(rank_);
    if constexpr (!kBatched) {
      EXPECT_LE(y.extent(0), exchange_.max_rows());
      return run_standard_experts<Quant, Act, Partial>(tokens, y, owned, hidden_, row_);
    } else {
      std::int64_t rows = 0;
      row_.resize(static_cast<std::size_t>(hidden_));
      for (std::int64_t e = 0; e < tokens.rows.extent(0); ++e) {
        EXPECT_LE(tokens.expert_num_tokens(e), exchange_.max_rows());
        for (std::int64_t i = 0; i < tokens.expert_num_tokens(e); ++i, ++rows) {
          Quant{}.template dequantize_row<Act>(moe::row_ptr(tokens.rows, e, i), moe::row_ptr(tokens.scales, e, i), hidden_, row_.data());
          for (std::int64_t h = 0; h < hidden_; ++h) {
            moe::row_ptr(y, e, i)[h] =
                moe::from_float<Partial>(factor(owned[static_cast<std::size_t>(e)]) * row_[static_cast<std::size_t>(h)]);
          }
        }
      }
      return rows;
    }
  }

  /// Runs the experts from the result of the last prepare() to the input of finalize().
  template <class Tokens>
  std::int64_t run_experts(Tokens const& tokens) {
    return run_experts(tokens, exchange_.expert_output());
  }

  /// prepare, experts, finalize: [rows, hidden]. pause() runs before each of the three.
  template <class Pause>
  std::vector<Act> forward(Batch<Act> const& b, Pause&& pause) {
    std::vector<Act> out(b.x.size(), moe::from_float<Act>(-77.0F));
    pause();
    auto const tokens = exchange_.prepare(cast(b), {});
    pause();
    slots_ = run_experts(tokens, exchange_.expert_output());
    pause();
    exchange_.finalize(view(out, b), {});
    return out;
  }
  std::vector<Act> forward(Batch<Act> const& b) {
    return forward(b, [] {});
  }
  void check(Batch<Act> const& b, std::string const& what = "") { compare(forward(b), b, what); }
  /// Compares `out` with the expected outputs; every rank knows every rank's batch.
  void compare(std::vector<Act> const& out, Batch<Act> const& b, std::string const& what = "") const {
    for (std::int64_t t = 0; t < b.rows; ++t) {
      for (std::int64_t h = 0; h < b.hidden; ++h) {
        ASSERT_EQ(moe::to_float(out[static_cast<std::size_t>(t * b.hidden + h)]), b.expected(t, h, num_experts_))
            << what << " rank " << rank_ << " token " << t << " column " << h;
      }
    }
  }
  /// The rows or slots with work on this rank in the last forward().
  std::int64_t slots() const { return slots_; }

  static moe::RoutedTokens<Act, Cfg::hidden> cast(Batch<Act> const& b) {
    auto const in = b.tokens();
    return {moe::make_rows<Cfg::hidden>(in.hidden.data_handle(), in.hidden.extent(0), in.hidden.extent(1)), in.topk_ids, in.topk_weights};
  }
  static moe::Rows<Act, Cfg::hidden> view(std::vector<Act>& out, Batch<Act> const& b) {
    return moe::make_rows<Cfg::hidden>(out.data(), b.rows, b.hidden);
  }

 private:
  int rank_;
  std::int64_t hidden_;
  int num_experts_;
  bool on_input_;
  moe::ExpertPlacement placement_;
  moe::Arena<moe::space::host> arena_;
  Exchange exchange_;
  std::vector<float> row_;
  std::int64_t slots_ = 0;
};

}  // namespace moe_test
