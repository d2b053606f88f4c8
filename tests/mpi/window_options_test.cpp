// SPDX-License-Identifier: Apache-2.0
// tests/mpi/window_options_test.cpp: options of LowLatency: outputs that travel coded or are not copied, masks for dead ranks,
// wait statistics, the rank-major layout.
// moe-ranks: 1 2 3 4 8
#include <chrono>
#include <cmath>

#include "moe/backends/window/host/expert_major.hpp"
#include "window_harness.hpp"

namespace {

using namespace moe_test;
using moe::ErrorCode;
using moe::backends::CombineFormat;
using H = WindowHarness<LowLatencyCase>;

class WindowOptions : public testing::Test {
 protected:
  Comm comm{MPI_COMM_WORLD, {.timeout_ms = 30'000}};
  int rank() const { return comm.rank(); }
  int experts() const { return 3 * comm.size(); }
  static H::Params patient() { return H::patient(); }
};

// Parameters that change the window's layout or who waits for whom are compared at construction, each by name.
template <class Case, class Change>
std::string disagree(Comm& comm, Change&& change) {
  auto params = WindowHarness<Case>::patient();
  if (comm.rank() == comm.size() - 1) change(params);
  return expect_error(ErrorCode::mismatch, [&] { WindowHarness<Case>(comm, {.num_experts = comm.size(), .params = params}); });
}
TEST_F(WindowOptions, T12_OptionsThatDifferAreNamed) {
  if (comm.size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  auto expect_named = [&](std::string const& message, std::string const& field, auto const& most, auto const& last) {
    EXPECT_EQ(message.find(moe::text(field, ": rank 0 has ", most, ", rank ", comm.size() - 1, " has ", last, " (")), 0U) << message;
  };
  expect_named(disagree<LowLatencyCase>(comm, [](auto& p) { p.num_buffer_sets = 2; }), "num_buffer_sets", 1, 2);
  expect_named(disagree<LowLatencyCase>(comm, [](auto& p) { p.deduplicate = true; }), "backend", "low_latency", "low_latency+dedup");
  expect_named(disagree<LowLatencyCase>(comm, [](auto& p) { p.masks = true; }), "backend", "low_latency", "low_latency+masks");
  expect_named(disagree<PplxCase>(comm, [&](auto& p) { p.dp_size = comm.size(); }), "dp_size", 1, comm.size());
  expect_named(disagree<HighThroughputCase>(comm, [](auto& p) { p.max_recv_rows = 5; }), "max_recv_rows", 8 * comm.size(), 5);
  expect_named(disagree<TwoSidedCase>(comm, [](auto& p) { p.queue_depth = 4; }), "queue_depth", 2, 4);
  expect_named(disagree<TwoSidedCase>(comm, [](auto& p) { p.queue_entry_bytes = 68 * 1024; }), "queue_entry_bytes", 34 * 1024, 68 * 1024);
  // The same number of bytes in another geometry.
  auto const message = disagree<TwoSidedCase>(comm, [](auto& p) {
    p.queue_depth = 1;
    p.queue_entry_bytes *= 2;
  });
  expect_named(message, "queue_depth", 2, 1);
  WindowHarness<TwoSidedCase> h(comm, {.num_experts = comm.size()});
  h.check(random_batch<float>(rank(), 1, 4, 32, 3, comm.size()), "the communicator still works");
}

TEST_F(WindowOptions, T18_ZeroCopy) {
  auto params = patient();
  params.zero_copy = true;
  params.num_buffer_sets = 2;
  H h(comm, {.hidden = 40, .num_experts = experts(), .k = 3, .max_tokens = 9, .params = params});
  for (int round = 0; round < 20 && !HasFatalFailure(); ++round) {
    h.check(random_batch<float>(rank(), round, random_rows(rank(), round, 9), 40, 3, experts()), moe::text("round ", round));
  }
  auto& x = h.exchange();
  for (int round = 0; round < 10; ++round) {  // two batches under way, in one buffer set and in two
    auto const b0 = random_batch<float>(rank(), 2 * round, random_rows(rank(), round, 9), 40, 3, experts());
    auto const b1 = random_batch<float>(rank(), 2 * round + 1, random_rows(rank(), round + 50, 9), 40, 3, experts());
    auto const d0 = x.send(b0.tokens());
    auto const t0 = x.receive(d0);
    auto const d1 = x.send(b1.tokens(), round % 2);
    h.run_experts(t0, x.expert_output(d0));
    h.run_experts(x.receive(d1), x.expert_output(d1));
    for (auto const& [d, b] : {std::pair(d0, &b0), std::pair(d1, &b1)}) {
      std::vector<float> out(b->x.size());
      x.send_outputs(d);
      x.receive_outputs(d, h.view(out, *b));
      h.compare(out, *b);
    }
  }
  params.combine = CombineFormat::logfmt;
  expect_error(ErrorCode::argument, [&] { H(comm, {.num_experts = experts(), .params = params}); });
  params.combine = CombineFormat::plain;
  params.deduplicate = true;
  expect_error(ErrorCode::unsupported, [&] { H(comm, {.num_experts = experts(), .params = params}); });
}

// Bounds: the error of e4m3 is at most half of 2^-3 of a value, or half of 2^-9 of the scale; that of LogFMT half of 2^(32/510) - 1 of a
// value, or 2^-32 of the largest. The cosine of the outputs is docs/semantics/exchange.md T18.
TEST_F(WindowOptions, T18_CodedOutputs) {
  int constexpr kHidden = 328;
  for (auto format : {CombineFormat::fp8, CombineFormat::logfmt}) {
    for (bool deduplicate : {false, true}) {
      auto params = patient();
      params.combine = format;
      params.deduplicate = deduplicate;
      H h(comm, {.hidden = kHidden, .num_experts = experts(), .k = 3, .params = params});
      for (int round = 0; round < 8; ++round) {
        auto b = random_batch<float>(rank(), round, random_rows(rank(), round, 8), kHidden, 3, experts(), false);
        for (float& v : b.x) v *= round % 2 == 0 ? 1e-3F : 1.0F;  // LogFMT codes what is below one, and sends the other values as bf16
        auto const out = h.forward(b);
        double dot = 0, own = 0, ideal = 0;
        for (std::int64_t t = 0; t < b.rows; ++t) {
          for (std::int64_t i = 0; i < kHidden; ++i) {
            double sum = 0, size = 0;
            for (std::int64_t j = 0; j < 3; ++j) {
              auto const at = static_cast<std::size_t>(t * 3 + j);
              if (b.ids[at] < 0 || b.ids[at] >= experts()) continue;
              double const term = static_cast<double>(b.weights[at]) * factor(b.ids[at]) * b.x[static_cast<std::size_t>(t * kHidden + i)];
              sum += term;
              size += std::fabs(term);
            }
            double const got = out[static_cast<std::size_t>(t * kHidden + i)];
            double const relative = format == CombineFormat::fp8 ? 0.0625 : 0.0222 + 0.002;  // and bf16 before LogFMT
            // The least step of e4m3 is 2^-9 of 1/448 of the largest of 128 values, which lies below 64 times the largest input here.
            ASSERT_LE(std::fabs(got - sum), relative * size + 1e-3 * 64 * (round % 2 == 0 ? 1e-3 : 1.0) + 1e-6)
                << name(format) << " rank " << rank() << " (" << t << ", " << i << "), round " << round;
            dot += got * sum;
            own += got * got;
            ideal += sum * sum;
          }
        }
        if (ideal > 0) {
          EXPECT_GT(dot / std::sqrt(own * ideal), 0.999) << name(format) << " round " << round;
        }
      }
    }
  }
}

TEST(CombineFormat, T18_CodesOfOneRow) {
  std::mt19937 gen(11);
  std::vector<float> x(300), back(300);
  for (auto format : {CombineFormat::fp8, CombineFormat::logfmt}) {
    std::vector<std::byte> codes(static_cast<std::size_t>(moe::detail::combine_row_bytes(format, 300)));
    std::vector<std::uint32_t> headers(static_cast<std::size_t>(moe::detail::combine_groups(300)));
    for (int round = 0; round < 200; ++round) {
      int const spread = round % 40;
      for (float& v : x) {
        v = moe::to_float(moe::from_float<moe::bf16>(
            std::ldexp(static_cast<float>(gen() % 2001) / 1000.0F - 1.0F, -static_cast<int>(gen() % static_cast<unsigned>(spread + 1)))));
      }
      if (round % 5 == 0) std::fill(x.begin(), x.begin() + 128, 0.0F);
      if (round % 7 == 0) x[130] = 3.0F;  // this group travels as bf16
      moe::detail::encode_row(format, x.data(), 300, codes.data(), headers.data());
      moe::detail::decode_row(format, codes.data(), headers.data(), 300, back.data());
      for (std::size_t g = 0; g < 300; g += 128) {
        float largest = 0;
        for (std::size_t i = g; i < std::min<std::size_t>(g + 128, 300); ++i) largest = std::max(largest, std::fabs(x[i]));
        for (std::size_t i = g; i < std::min<std::size_t>(g + 128, 300); ++i) {
          float const bound = format == CombineFormat::fp8 ? std::max(std::fabs(x[i]) / 16, std::max(largest, 1e-4F) / 448 / 1024) * 1.001F
                              : largest >= 1.0F            ? 0.0F
                                                           : std::fabs(x[i]) * 0.0225F + std::ldexp(largest, -32);
          ASSERT_LE(std::fabs(back[i] - x[i]), bound) << name(format) << " " << x[i] << " of " << largest;
        }
      }
    }
    // Values without a logarithm.
    std::fill(x.begin(), x.end(), std::numeric_limits<float>::quiet_NaN());
    moe::detail::encode_row(format, x.data(), 300, codes.data(), headers.data());
    moe::detail::decode_row(format, codes.data(), headers.data(), 300, back.data());
    EXPECT_TRUE(std::isnan(back[0])) << name(format);
  }
}

// T11: the last rank is missing for some rounds. The others mask it, lose only its experts' terms, and do not wait for it again. Then all
// clear the mask, and it takes part.
TEST_F(WindowOptions, T11_RankThatStaysAwayIsMasked) {
  if (comm.size() == 1) GTEST_SKIP() << "one rank has no peers";
  int const last = comm.size() - 1;
  for (bool deduplicate : {false, true}) {
    for (bool zero_copy : {false, true}) {
      if (deduplicate && zero_copy) continue;
      auto params = patient();
      params.masks = true;
      params.deduplicate = deduplicate;
      params.zero_copy = zero_copy;
      H h(comm, {.hidden = 16, .num_experts = experts(), .k = 3, .params = params});
      auto& x = h.exchange();
      auto batch = [&](int round) { return random_batch<float>(rank(), round, random_rows(rank(), round, 8), 16, 3, experts()); };
      for (int round = 0; round < 3; ++round) h.check(batch(round), "all alive");
      auto const start = std::chrono::steady_clock::now();
      x.window().set_timeout_ms(1500);  // live ranks of a busy machine must not look dead
      for (int round = 3; round < 23 && rank() != last; ++round) {
        auto b = batch(round);
        auto const out = h.forward(b);
        for (auto& id : b.ids) id = id >= 0 && id < experts() && h.placement().owner(id) == last ? -1 : id;
        h.compare(out, b, moe::text("without rank ", last, ", round ", round));
        EXPECT_EQ(x.query_mask()[static_cast<std::size_t>(last)], true);
      }
      if (rank() != last) {
        EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(12)) << "no rank waits for it twice";
      }
      x.window().set_timeout_ms(20'000);
      MPI_Barrier(MPI_COMM_WORLD);
      x.clear_mask();
      for (int round = 30; round < 40; ++round) h.check(batch(round), "back");
      // By hand: all but rank 0 lose rank 0.
      if (comm.size() > 2) {
        if (rank() != 0) {
          x.mask_rank(0);
          auto b = batch(50);
          auto const out = h.forward(b);
          for (auto& id : b.ids) id = id >= 0 && id < experts() && h.placement().owner(id) == 0 ? -1 : id;
          h.compare(out, b, "rank 0 masked by hand");
        }
        MPI_Barrier(MPI_COMM_WORLD);
        x.clear_mask();
        h.check(batch(51), "and back");
      }
      expect_error(ErrorCode::argument, [&] { x.mask_rank(rank()); });
    }
  }
  H without(comm, {.hidden = 16, .num_experts = experts(), .k = 3});
  expect_error(ErrorCode::state, [&] { without.exchange().mask_rank(rank() == 0 ? 1 : 0); });
  expect_error(ErrorCode::state, [&] { without.exchange().clear_mask(); });
}

// F5: the column of a delayed rank stands out. Ranks that share a busy core wait for their turn, too: several tries.
TEST_F(WindowOptions, F5_WaitStatisticsNameTheLateRank) {
  if (comm.size() == 1) GTEST_SKIP() << "one rank has no peers";
  H h(comm, {.hidden = 16, .num_experts = experts(), .k = 3});
  auto const b = random_batch<float>(rank(), 1, 4, 16, 3, experts());
  auto const last = static_cast<std::size_t>(comm.size() - 1);
  bool const late = static_cast<std::size_t>(rank()) == last;
  int stands_out = 0;
  for (int attempt = 0; attempt < 10 && stands_out == 0; ++attempt) {
    h.check(b);
    MPI_Barrier(MPI_COMM_WORLD);
    auto const before = h.exchange().waited_ns();
    for (int round = 0; round < 5; ++round) {
      if (late) usleep(40'000);
      h.check(b);
    }
    auto const after = h.exchange().waited_ns();
    std::uint64_t others = 0;
    for (std::size_t r = 0; r < last; ++r) others = std::max(others, after[r] - before[r]);
    stands_out = late || (after[last] - before[last] > 100'000'000U && others * 10 < after[last] - before[last]) ? 1 : 0;
    EXPECT_EQ(after[static_cast<std::size_t>(rank())], 0U) << "no rank waits for itself";
    MPI_Allreduce(MPI_IN_PLACE, &stands_out, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
  }
  if (comm.size() <= 4) {
    EXPECT_EQ(stands_out, 1);
  }
}

struct RankMajorCase {
  using Backend = moe::backends::LowLatencyRankMajor<Window>;
  static Backend::Params params() { return {}; }
};

TEST_F(WindowOptions, T1_RankMajorLayout) {
  for (auto strategy : {moe::PlacementStrategy::linear, moe::PlacementStrategy::round_robin}) {
    WindowHarness<RankMajorCase> h(comm, {.hidden = 40, .num_experts = experts(), .k = 3, .max_tokens = 9, .strategy = strategy});
    for (int round = 0; round < 10; ++round) {
      h.check(random_batch<float>(rank(), round, random_rows(rank(), round, 9), 40, 3, experts()), moe::text("round ", round));
    }
  }
}

// The exchange works on the expert slots of a placement with redundant experts: a logical expert's copies have different ids.
template <class Case>
void redundant_placement(Comm& comm) {
  int const slots = 4 * comm.size();
  std::vector<std::int32_t> logical(static_cast<std::size_t>(slots));
  for (std::size_t p = 0; p < logical.size(); ++p)
    logical[p] = static_cast<std::int32_t>(p * 5 % static_cast<std::size_t>(3 * comm.size()));
  for (int e = 0; e < 3 * comm.size(); ++e) logical[static_cast<std::size_t>(e)] = e;  // each has at least one expert slot
  WindowHarness<Case> h(comm, {.hidden = 16,
                               .num_experts = slots,
                               .k = 3,
                               .placement = moe::ExpertPlacement::from_physical_to_logical(logical, 3 * comm.size(), comm.size())});
  for (int round = 0; round < 6; ++round) {
    h.check(random_batch<float>(comm.rank(), round, random_rows(comm.rank(), round, 8), 16, 3, slots), moe::text("round ", round));
  }
}
TEST_F(WindowOptions, T1_RedundantPlacements) {
  redundant_placement<LowLatencyCase>(comm);
  redundant_placement<DeduplicatedCase>(comm);
  redundant_placement<HighThroughputCase>(comm);
  redundant_placement<RankMajorCase>(comm);
}

TEST_F(WindowOptions, T14_ExpertMajorLists) {
  WindowHarness<HighThroughputCase> h(comm, {.hidden = 24, .num_experts = experts(), .k = 3, .max_tokens = 9});
  auto const owned = h.placement().local_to_physical(rank());
  for (int round = 0; round < 10; ++round) {
    auto const b = random_batch<float>(rank(), round, random_rows(rank(), round, 9), 24, 3, experts());
    auto const tokens = h.exchange().prepare(b.tokens(), {});
    int const alignment = 1 + round % 4;
    auto const list = moe::backends::expert_major(tokens, static_cast<int>(owned.size()), alignment);
    std::vector<float> y(list.rows.size() * 24, NAN);
    for (std::size_t e = 0; e < owned.size(); ++e) {
      EXPECT_EQ(list.first[e] % alignment, 0);
      std::vector<std::int32_t> counts(owned.size());
      h.exchange().expert_counts(1, counts.data());
      EXPECT_EQ(list.counts[e], counts[e]);
      for (std::int32_t i = list.first[e]; i < list.first[e] + list.counts[e]; ++i) {
        float const* const row = moe::row_ptr(tokens.rows, list.rows[static_cast<std::size_t>(i)]);
        for (std::size_t c = 0; c < 24; ++c) y[static_cast<std::size_t>(i) * 24 + c] = factor(owned[e]) * row[c];
      }
    }
    moe::backends::reduce_expert_major(tokens, list,
                                       moe::make_rows(static_cast<float const*>(y.data()), static_cast<std::int64_t>(list.rows.size()), 24),
                                       h.exchange().expert_output());
    std::vector<float> out(b.x.size());
    h.exchange().finalize(h.view(out, b), {});
    h.compare(out, b, moe::text("alignment ", alignment));
  }
  auto const tokens = h.exchange().prepare(random_batch<float>(rank(), 1, 2, 24, 3, experts()).tokens(), {});
  expect_error(ErrorCode::config, [&] { moe::backends::expert_major(tokens, static_cast<int>(owned.size()), 0); });
}

}  // namespace
