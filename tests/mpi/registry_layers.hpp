// SPDX-License-Identifier: Apache-2.0
// tests/mpi/registry_layers.hpp: every legal composition of registry::host_backends and host_experts, by its types, on the same random
// layers: against the same quantisation through one rank with the reference experts, and against Naive with them on all ranks.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "moe/eplb/expert_tensors.hpp"
#include "moe/experts/weights.hpp"
#include "moe/models/registry.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/routing/any_router.hpp"

namespace moe_test {

namespace hana = boost::hana;

using RegistryConfig = moe::registry::RuntimeLayer<float, float>;
template <class Quant, class Backend, class Experts>
using RegistryLayer = moe::ModularKernel<RegistryConfig, moe::routing::AnyRouter, Quant, Backend, Experts>;

/// Which experts can be chosen.
enum class Choice {
  free,       ///< any
  two,        ///< the correction bias of all but two is -inf: with k = 3 the last slot of every row is -1
  no_expert,  ///< the bias of all is -inf and such rows are dropped: every id is -1
  the_last,   ///< the last expert's bias makes it the first choice of every row
};
struct Scenario {
  char const* name;
  int num_experts;
  int k;
  std::int64_t max_tokens;
  moe::PlacementStrategy placement = moe::PlacementStrategy::linear;
  Choice choice = Choice::free;
  bool on_input = false;
  bool expert_bias = false;
  int rounds = 1;  ///< calls of one layer, each with other rows
};
inline constexpr Scenario kScenarios[] = {
    {.name = "UnevenRowsThreeCallsOfOneLayer", .num_experts = 8, .k = 3, .max_tokens = 7, .rounds = 3},
    {.name = "T20_ExpertsDoNotDivide", .num_experts = 7, .k = 3, .max_tokens = 5, .expert_bias = true},
    {.name = "RoundRobin", .num_experts = 10, .k = 2, .max_tokens = 5, .placement = moe::PlacementStrategy::round_robin},
    {.name = "DisabledExpertsLeaveIdsOfMinusOne", .num_experts = 9, .k = 3, .max_tokens = 4, .choice = Choice::two},
    {.name = "G2_AllIdsMinusOne", .num_experts = 5, .k = 2, .max_tokens = 3, .choice = Choice::no_expert},
    {.name = "T3_AllRowsOnOneExpert", .num_experts = 6, .k = 1, .max_tokens = 6, .choice = Choice::the_last},
    {.name = "T13_WeightOnInput", .num_experts = 6, .k = 1, .max_tokens = 4, .on_input = true},
    {.name = "T2_NoRowsAnywhere", .num_experts = 4, .k = 2, .max_tokens = 0},
};
// Multiples of 128, so that every scheme's groups fit; more than one group along hidden.
inline constexpr std::int64_t kHidden = 256;
inline constexpr std::int64_t kIntermediate = 128;

/// Values in (-scale, scale), the same with every standard library.
inline std::vector<float> uniform(std::int64_t n, double scale, unsigned seed) {
  std::mt19937 gen(seed);
  std::vector<float> v(static_cast<std::size_t>(n));
  for (float& x : v) x = static_cast<float>(scale * (static_cast<double>(gen()) / 2147483648.0 - 1.0));
  return v;
}

/// The weights of logical expert e, in any layer and on any rank.
struct ExpertValues {
  std::vector<float> w13, w2, b13, b2;
};
inline ExpertValues const& expert_values(std::size_t e) {
  static std::vector<ExpertValues> made;
  while (made.size() <= e) {
    auto const seed = static_cast<unsigned>(10 * made.size());
    made.push_back({uniform(2 * kIntermediate * kHidden, 1.7 / std::sqrt(double{kHidden}), seed + 1000),
                    uniform(kHidden * kIntermediate, 3.4 / std::sqrt(double{kHidden}), seed + 1001),
                    uniform(2 * kIntermediate, 0.5, seed + 1002), uniform(kHidden, 0.5, seed + 1003)});
  }
  return made[e];
}

/// At least `count` experts as a scheme stores them, each encoded once: a slot is copied from here.
template <class Quant>
moe::experts::WeightStore<RegistryConfig, Quant>& encoded_experts(int count) {
  static std::optional<moe::experts::WeightStore<RegistryConfig, Quant>> store;
  if (!store || store->num_local() < count) {
    store.emplace(std::max(count, std::ranges::max(kScenarios, {}, &Scenario::num_experts).num_experts), kHidden, kIntermediate, true);
    for (std::int64_t e = 0; e < store->num_local(); ++e) {
      ExpertValues const& values = expert_values(static_cast<std::size_t>(e));
      store->set_expert(e, values.w13.data(), values.w2.data());
    }
  }
  return *store;
}

/// Rows of a rank: no rows on one rank of every call, the full capacity on another.
inline std::int64_t num_rows_of(Scenario const& s, int rank, int ranks, int round) {
  if (ranks > 1 && rank == (round + 1) % ranks) return 0;
  if (rank == round % ranks) return s.max_tokens;
  std::mt19937 gen(static_cast<unsigned>(31 * rank + 1009 * round + 17));
  return static_cast<std::int64_t>(gen() % static_cast<unsigned>(s.max_tokens + 1));
}

/// One rank's input of a call.
struct Input {
  std::int64_t rows;
  std::vector<float> hidden, logits;
  Input(Scenario const& s, int rank, int ranks, int round)
      : rows(num_rows_of(s, rank, ranks, round)),
        hidden(uniform(rows * kHidden, 1.7, static_cast<unsigned>(100 * rank + round))),
        logits(uniform(rows * s.num_experts, 2.5, static_cast<unsigned>(100 * rank + round + 50'000))) {}
};

/// A composition with its weights and its communicator.
template <class Quant, class Backend, class Experts>
class Subject {
 public:
  using Layer = RegistryLayer<Quant, Backend, Experts>;
  using Comm = typename Backend::Comm;
  static constexpr bool kLocal = std::is_same_v<Comm, moe::comm::Self<>>;  ///< every rank holds all experts and works alone

  Subject(moe::comm::Mpi& mpi, Scenario const& s)
      : placement_(s.num_experts, kLocal ? 1 : mpi.size(), s.placement),
        owned_(placement_.local_to_physical(kLocal ? 0 : mpi.rank())),
        store_(static_cast<std::int64_t>(owned_.size()), kHidden, kIntermediate, true),
        bias_(static_cast<std::size_t>(s.num_experts), 0.0F),
        layer_(comm(mpi), filled(s), params(s)) {}

  /// The output [rows, H] of this rank. Routing in topk_ids().
  std::vector<float> forward(Input const& in, int num_experts) {
    std::vector<float> out(in.hidden.size(), std::numeric_limits<float>::quiet_NaN());
    layer_.forward(moe::make_rows(in.hidden.data(), in.rows, kHidden), moe::make_rows(in.logits.data(), in.rows, num_experts),
                   moe::make_rows(out.data(), in.rows, kHidden));
    return out;
  }
  /// The output written over the input.
  std::vector<float> forward_in_place(Input const& in, int num_experts) {
    std::vector<float> rows = in.hidden;
    layer_.forward(moe::make_rows(static_cast<float const*>(rows.data()), in.rows, kHidden),
                   moe::make_rows(in.logits.data(), in.rows, num_experts), moe::make_rows(rows.data(), in.rows, kHidden));
    return rows;
  }
  /// forward_routed() with the routing of the last call, in arrays of the caller.
  std::vector<float> forward_routed(Input const& in) {
    auto const slots = layer_.topk_ids().size();
    std::vector<std::int32_t> const ids = topk_ids();
    std::vector<float> const weights(layer_.topk_weights().data_handle(), layer_.topk_weights().data_handle() + slots);
    auto const k = static_cast<std::int64_t>(layer_.topk_ids().extent(1));
    std::vector<float> out(in.hidden.size(), std::numeric_limits<float>::quiet_NaN());
    layer_.forward_routed(moe::make_rows(in.hidden.data(), in.rows, kHidden), moe::make_rows(ids.data(), in.rows, k),
                          moe::make_rows(weights.data(), in.rows, k), moe::make_rows(out.data(), in.rows, kHidden));
    return out;
  }
  std::vector<std::int32_t> topk_ids() {
    auto const ids = layer_.topk_ids();
    return {ids.data_handle(), ids.data_handle() + ids.size()};
  }

 private:
  Comm& comm(moe::comm::Mpi& mpi) {
    if constexpr (kLocal) {
      static Comm self;
      (void)mpi;
      return self;
    } else {
      return mpi;
    }
  }
  moe::WeightsOf<RegistryConfig, Quant> filled(Scenario const& s) {
    auto const from = moe::eplb::expert_tensors(encoded_experts<Quant>(s.num_experts));
    auto const to = moe::eplb::expert_tensors(store_);
    for (std::size_t local = 0; local < owned_.size(); ++local) {
      auto const at = static_cast<std::int64_t>(local);
      for (std::size_t t = 0; t < to.size(); ++t) {
        std::memcpy(to[t].data + at * to[t].stride, from[t].data + owned_[local] * from[t].stride, static_cast<std::size_t>(to[t].bytes));
      }
      ExpertValues const& values = expert_values(static_cast<std::size_t>(owned_[local]));
      if (s.expert_bias) store_.set_bias(at, values.b13.data(), values.b2.data());
    }
    return store_.view();
  }
  typename Layer::Params params(Scenario const& s) {
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    moe::routing::RouterConfig router{.num_experts = s.num_experts, .topk = s.k, .renorm = moe::routing::Renorm::sum};
    auto const last = static_cast<std::size_t>(s.num_experts - 1);
    if (s.choice == Choice::the_last) bias_[last] = 10.0F;
    if (s.choice == Choice::two || s.choice == Choice::no_expert) std::fill(bias_.begin(), bias_.end(), -kInfinity);
    if (s.choice == Choice::two) bias_[1] = bias_[last] = 0.0F;
    if (s.choice == Choice::no_expert) router.degenerate = moe::routing::DegeneratePolicy::drop;
    if (s.choice != Choice::free) router.correction_bias = bias_.data();
    return {.shape = {kHidden, kIntermediate, s.num_experts, s.k, s.on_input},
            .max_tokens_per_rank = s.max_tokens,
            .placement = placement_,
            .router = router};
  }

  moe::ExpertPlacement placement_;
  std::span<std::int32_t const> owned_;
  moe::experts::WeightStore<RegistryConfig, Quant> store_;
  std::vector<float> bias_;
  Layer layer_;
};

/// The largest step of the grid that `Quant` rounds a row of the intermediate to, as a part of the row's largest value.
template <class Quant>
constexpr double grid_step() {
  using moe::DType;
  if constexpr (Quant::kActGranularity == moe::quantization::ScaleGranularity::none) {
    return 0;
  } else {
    constexpr DType kCode = Quant::kPayloadDType;
    static_assert(kCode == DType::e4m3 || kCode == DType::e2m1 || kCode == DType::i8, "a new grid needs its step here");
    // With a scale that is a power of two or comes from the checkpoint, the largest value may be anywhere on the grid; else it is the
    // largest code.
    constexpr bool kAnywhere = Quant::Codec::kPowerOfTwo || Quant::kActGranularity == moe::quantization::ScaleGranularity::per_tensor;
    if (kCode == DType::i8) return kAnywhere ? 2.0 / 127 : 1.0 / 127;
    if (kCode == DType::e4m3) return kAnywhere ? 1.0 / 8 : 32.0 / 448;
    return kAnywhere ? 1.0 / 2 : 2.0 / 6;
  }
}

/// The allowed error of each row in the 2-norm, as a fraction of a norm.
///
/// Sums in another order differ by rounding: 1e-5. A scheme that rounds the input of the second product turns a rounding difference before
/// it into a step of its grid if the value lies next to the edge of a step. The chance is at most 1e-5 for each of the k I = 384 values of
/// a row, so two in one row are unlikely, and so are more than a few such rows (expect_close_rows()). One step moves a row y = W2 h by step
/// |h|max |w| for a column w of W2. |y| is about |h| |w|, at least |h|max |w|, because the columns are independent.
struct Tolerance {
  double rounding = 1e-5;  ///< of the largest value of all rows
  double step = 0;         ///< of the row: grid_step()
};

/// Each row within its tolerance, and at most one row in eight, and one, further off than rounding: a wrong scale moves every row.
inline void expect_close_rows(std::vector<float> const& got, std::vector<float> const& expected, Tolerance const& t, char const* what) {
  ASSERT_EQ(got.size(), expected.size());
  std::size_t far = 0;
  double largest = 0;
  for (float v : expected) largest = std::max(largest, std::abs(static_cast<double>(v)));
  for (std::size_t row = 0; row < got.size(); row += kHidden) {
    double error = 0, largest_error = 0, norm = 0;
    for (std::size_t i = row; i < row + kHidden; ++i) {
      double const difference = std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
      ASSERT_FALSE(std::isnan(difference)) << what << ": NaN in row " << row / kHidden;
      largest_error = std::max(largest_error, difference);
      error += difference * difference;
      norm += static_cast<double>(expected[i]) * expected[i];
    }
    if (largest_error <= t.rounding * largest) continue;
    ASSERT_GT(t.step, 0) << what << ": row " << row / kHidden << " is off by " << largest_error << ", largest " << largest;
    ASSERT_LE(std::sqrt(error), t.step * std::sqrt(norm)) << what << ": row " << row / kHidden << ", more than one step of the grid";
    ++far;
  }
  EXPECT_LE(far, 1 + got.size() / kHidden / 8) << what << ": rows that are off by more than rounding";
}

/// Scenarios of compositions that have run to their end in this program.
inline int compositions_run = 0;

template <class Quant, class Backend, class Experts>
class CompositionTest : public testing::Test {
 public:
  explicit CompositionTest(Scenario const& s) : s_(s) {}
  void TestBody() override {
    using Oracle = Subject<Quant, moe::backends::NoExpertParallel<>, moe::experts::Reference<float>>;
    using OnAllRanks = Subject<Quant, moe::backends::Naive<moe::comm::Mpi>, moe::experts::Reference<float>>;
    moe::comm::Mpi mpi(MPI_COMM_WORLD, {.timeout_ms = 30'000});
    Oracle oracle(mpi, s_);
    OnAllRanks naive(mpi, s_);
    Subject<Quant, Backend, Experts> subject(mpi, s_);
    bool const same_order = std::is_same_v<Experts, moe::experts::Reference<float>>;
    for (int round = 0; round < s_.rounds; ++round) {
      Input const in(s_, mpi.rank(), mpi.size(), round);
      Tolerance tolerance;
      if (!same_order) tolerance.step = grid_step<Quant>();
      std::vector<float> const expected = oracle.forward(in, s_.num_experts);
      expect_close_rows(naive.forward(in, s_.num_experts), expected, {}, "Naive, against one rank");
      std::vector<float> const got = subject.forward(in, s_.num_experts);
      expect_close_rows(got, expected, tolerance, "against one rank");
      EXPECT_EQ(subject.topk_ids(), oracle.topk_ids());
      check_routing(subject.topk_ids(), expected);
      if (round == 0) {
        EXPECT_EQ(subject.forward_routed(in), got) << "the same routing from the caller";
        EXPECT_EQ(subject.forward_in_place(in, s_.num_experts), got) << "the output over the input";
      }
    }
    ++compositions_run;
  }

 private:
  /// Checks that the scenario matches its name.
  void check_routing(std::vector<std::int32_t> const& ids, std::vector<float> const& output) const {
    auto const k = static_cast<std::size_t>(s_.k);
    bool const zero = std::all_of(output.begin(), output.end(), [](float v) { return v == 0.0F; });
    EXPECT_EQ(zero, s_.choice == Choice::no_expert || output.empty());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      switch (s_.choice) {
        case Choice::free: EXPECT_GE(ids[i], 0); break;
        case Choice::two: EXPECT_EQ(ids[i] == -1, i % k == 2) << "slot " << i; break;
        case Choice::no_expert: EXPECT_EQ(ids[i], -1); break;
        case Choice::the_last: EXPECT_EQ(ids[i], s_.num_experts - 1); break;
      }
    }
  }
  Scenario s_;
};

/// Runs last: checks that as many compositions ran as the file states.
class AllRan : public testing::Test {
 public:
  explicit AllRan(int expected) : expected_(expected) {}
  void TestBody() override {
    if (testing::GTEST_FLAG(filter) != "*") GTEST_SKIP() << "a filter is set";
    EXPECT_EQ(compositions_run, expected_) << "another number of compositions is legal, or some did not run: count again";
  }

 private:
  int expected_;
};

/// One GoogleTest per legal composition of lists of schemes and host backends with the registry's host experts, and scenario. `expected`:
/// compositions.
template <class Quants, class Backends>
bool register_compositions(Quants quants, Backends backends, int expected, char const* file, int line) {
  auto const legal = moe::registry::legal_compositions<RegistryConfig>(quants, backends, moe::registry::host_experts);
  hana::for_each(legal, [&](auto triple) {
    using Quant = typename decltype(+triple[hana::size_c<0>])::type;
    using Backend = typename decltype(+triple[hana::size_c<1>])::type;
    using Experts = typename decltype(+triple[hana::size_c<2>])::type;
    std::string const suite = moe::text("Composition_", Quant::kName, "_", Backend::kName, "_", Experts::kName);
    for (Scenario const& s : kScenarios) {
      testing::RegisterTest(suite.c_str(), s.name, nullptr, nullptr, file, line,
                            [s]() -> testing::Test* { return new CompositionTest<Quant, Backend, Experts>(s); });
    }
  });
  testing::RegisterTest("Compositions", "AllRan", nullptr, nullptr, file, line,
                        [expected]() -> testing::Test* { return new AllRan(expected * static_cast<int>(std::size(kScenarios))); });
  return true;
}

template <class Quants>
bool register_compositions(Quants quants, int expected, char const* file, int line) {
  return register_compositions(quants, moe::registry::host_backends, expected, file, line);
}

/// The schemes [First, Last) of the registry's common ones, so that a new one is in some file without a change here.
template <std::size_t First, std::size_t Last>
constexpr auto schemes() {
  return hana::drop_front(hana::take_front(moe::registry::common_quantizations, hana::size_c<Last>), hana::size_c<First>);
}
inline constexpr std::size_t kNumSchemes = decltype(hana::size(moe::registry::common_quantizations))::value;

}  // namespace moe_test
