// SPDX-License-Identifier: Apache-2.0
// tests/unit/eplb_balancer_test.cpp: windows, step counters, agreement between ranks (cases B10, B11, B21-B23 and the early first
// rebalance).
#include "moe/eplb/balancer.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "expect_error.hpp"

namespace {

using moe::Error;
using moe::ErrorCode;
using moe::eplb::Balancer;
using moe::eplb::ExpertMaps;
using moe::eplb::LoadWindow;
using moe::eplb::SelfGroup;
using moe::eplb::StepInput;
using moe::eplb::StepOutcome;
using moe::eplb::Table;
using moe_test::expect_error;

// The ranks of one process as a group: every collective is an all-gather of words; a missing rank is E_TIMEOUT.
class ThreadGroup {
 public:
  struct Shared {
    explicit Shared(int size) : words(static_cast<std::size_t>(size)) {}
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<std::vector<std::uint64_t>> words;
    std::vector<std::vector<std::uint64_t>> result;
    int arrived = 0;
    std::uint64_t round = 0;
  };
  ThreadGroup(Shared& shared, int rank) : shared_(shared), rank_(rank) {}

  int size() const { return static_cast<int>(shared_.words.size()); }
  void all_reduce_sum(std::span<std::int64_t> values) {
    auto const all = exchange({values.begin(), values.end()});
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = 0;
      for (auto const& rank : all) values[i] += static_cast<std::int64_t>(rank.at(i));
    }
  }
  std::vector<std::uint64_t> all_gather(std::uint64_t word) {
    std::vector<std::uint64_t> out;
    for (auto const& rank : exchange({word})) out.push_back(rank.at(0));
    return out;
  }

 private:
  std::vector<std::vector<std::uint64_t>> exchange(std::vector<std::uint64_t> mine) {
    std::unique_lock lock(shared_.mutex);
    shared_.words[static_cast<std::size_t>(rank_)] = std::move(mine);
    std::uint64_t const round = shared_.round;
    if (++shared_.arrived == size()) {
      shared_.result = shared_.words;
      shared_.arrived = 0;
      ++shared_.round;
      shared_.changed.notify_all();
    } else if (!shared_.changed.wait_for(lock, std::chrono::seconds(20), [&] { return shared_.round != round; })) {
      throw Error(ErrorCode::timeout, "a rank did not join the collective");
    }
    return shared_.result;
  }
  Shared& shared_;
  int rank_;
};

// Runs `work(rank, group)` on every rank at once and rethrows the first error of each rank through `errors`.
std::vector<std::exception_ptr> on_ranks(int size, std::function<void(int, ThreadGroup&)> const& work) {
  ThreadGroup::Shared shared(size);
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  threads.reserve(errors.size());
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      ThreadGroup group(shared, r);
      try {
        work(r, group);
      } catch (...) {
        errors[static_cast<std::size_t>(r)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}
void expect_none(std::vector<std::exception_ptr> const& errors) {
  for (auto const& error : errors) {
    if (!error) continue;
    try {
      std::rethrow_exception(error);
    } catch (std::exception const& e) {
      ADD_FAILURE() << e.what();
    }
  }
}

void fill(Table<std::int32_t>& table, std::int32_t value) { std::fill(table.flat().begin(), table.flat().end(), value); }

TEST(LoadWindow, B21_WrapsAround) {
  LoadWindow window(2, 1, 2);
  auto const step = [](std::int64_t a, std::int64_t b) { return Table<std::int64_t>(std::vector<std::vector<std::int64_t>>{{a, b}}); };
  window.record(step(1, 10));
  EXPECT_EQ(window.position(), 1);
  window.record(step(2, 20));
  EXPECT_EQ(window.position(), 0);
  EXPECT_EQ(window.sums(), step(3, 30));
  window.record(step(4, 40));
  EXPECT_EQ(window.sums(), step(6, 60)) << "the oldest step left";
  window.clear();
  EXPECT_EQ(window.sums(), step(0, 0));

  LoadWindow one(1, 1, 2);
  one.record(step(5, 6));
  one.record(step(7, 8));
  EXPECT_EQ(one.sums(), step(7, 8));
  EXPECT_EQ(one.position(), 0);
  expect_error(ErrorCode::config, "eplb window must be greater than 0, is 0", [] { LoadWindow(0, 1, 1); });
  expect_error(ErrorCode::argument, "load is [2, 2], the load window's steps are [1, 2]", [&] { one.record(Table<std::int64_t>(2, 2)); });
}

RC_GTEST_PROP(LoadWindow, B21_SumsAreThoseOfTheLastSteps, ()) {
  int const size = *rc::gen::inRange(1, 6);
  auto const steps = *rc::gen::container<std::vector<std::int64_t>>(rc::gen::inRange<std::int64_t>(0, 1000));
  LoadWindow window(size, 1, 1);
  for (std::size_t i = 0; i < steps.size(); ++i) {
    window.record(Table<std::int64_t>(1, 1, steps[i]));
    std::int64_t expected = 0;
    for (std::size_t j = i + 1 > static_cast<std::size_t>(size) ? i + 1 - static_cast<std::size_t>(size) : 0; j <= i; ++j)
      expected += steps[j];
    RC_ASSERT(window.sums()(0, 0) == expected);
  }
}

TEST(LoadWindow, B23_CountsNear2To31) {
  std::int32_t const most = std::numeric_limits<std::int32_t>::max();
  ExpertMaps const maps = ExpertMaps::initial(1, 2, 2);  // two replicas of each expert
  Table<std::int32_t> pass(1, 4, most);
  LoadWindow window(3, 1, 2);
  for (int i = 0; i < 3; ++i) window.record(moe::eplb::to_logical(pass, maps));
  EXPECT_EQ(window.sums()(0, 0), std::int64_t{6} * most);
  pass(0, 1) = -1;
  expect_error(ErrorCode::argument, "load of physical expert 1 in layer 0 must be at least 0", [&] { moe::eplb::to_logical(pass, maps); });
  expect_error(ErrorCode::argument, "load is [2, 4], the maps are of [1, 4]",
               [&] { moe::eplb::to_logical(Table<std::int32_t>(2, 4), maps); });
}

TEST(Balancer, FirstRearrangementComesEarly) {
  Balancer balancer({.window = 4, .step_interval = 10});
  balancer.add_model("main", ExpertMaps::initial(1, 4, 0), 1);
  SelfGroup self;
  EXPECT_EQ(balancer.step_count(), 8) << "interval - interval / 4";
  EXPECT_FALSE(balancer.step({}, self).rearrange);
  EXPECT_TRUE(balancer.step({}, self).rearrange);
  EXPECT_EQ(balancer.step_count(), 0);
  for (int i = 0; i < 9; ++i) EXPECT_FALSE(balancer.step({}, self).rearrange);
  EXPECT_TRUE(balancer.step({}, self).rearrange);
}

TEST(Balancer, B21_IntervalOfOne) {
  Balancer balancer({.window = 1, .step_interval = 1});
  int const main = balancer.add_model("main", ExpertMaps::initial(1, 2, 0), 1);
  SelfGroup self;
  for (int i = 1; i < 5; ++i) {
    fill(balancer.load_pass(main), i);
    EXPECT_TRUE(balancer.step({}, self).rearrange);
    EXPECT_EQ(balancer.global_load(main, self)(0, 1), i);
    EXPECT_EQ(balancer.load_pass(main)(0, 0), 0) << "counts start anew";
  }
}

TEST(Balancer, NoTriggerWhileATransferIsUnderWay) {
  Balancer balancer({.window = 1, .step_interval = 4});
  balancer.add_model("main", ExpertMaps::initial(1, 2, 0), 1);
  SelfGroup self;
  EXPECT_TRUE(balancer.step({}, self).rearrange);
  for (int i = 0; i < 6; ++i) EXPECT_FALSE(balancer.step({.rearranging = true}, self).rearrange);
  EXPECT_EQ(balancer.step_count(), 6) << "the counter keeps running";
  EXPECT_TRUE(balancer.step({}, self).rearrange) << "at the first eligible step after";
  Balancer fixed({.window = 1, .step_interval = 1, .never_rearrange = true});
  EXPECT_FALSE(fixed.step({}, self).rearrange);
}

TEST(Balancer, ProfileStepsCountNothing) {
  Balancer balancer({.window = 2, .step_interval = 4});
  int const main = balancer.add_model("main", ExpertMaps::initial(1, 2, 0), 1);
  SelfGroup self;
  fill(balancer.load_pass(main), 3);
  StepOutcome const outcome = balancer.step({.is_profile = true}, self);
  EXPECT_TRUE(outcome.profile);
  EXPECT_FALSE(outcome.rearrange);
  EXPECT_EQ(balancer.step_count(), 3);
  EXPECT_EQ(balancer.window(main).position(), 0);
}

TEST(Balancer, B10_DummyStepsOnOneRank) {
  std::deque<Balancer> ranks(2, Balancer({.window = 4, .step_interval = 4}));
  for (auto& rank : ranks) rank.add_model("main", ExpertMaps::initial(1, 2, 2), 2);
  std::vector<int> triggers(2, 0);
  expect_none(on_ranks(2, [&](int r, ThreadGroup& group) {
    Balancer& mine = ranks[static_cast<std::size_t>(r)];
    for (int i = 0; i < 9; ++i) {
      fill(mine.load_pass(0), 5);
      bool const rearrange = mine.step({.is_dummy = r == 1, .log_stats = true}, group).rearrange;
      if (!rearrange) continue;
      ++triggers[static_cast<std::size_t>(r)];
      mine.propose(0, {.num_ranks = 2}, group);  // collective: hangs or fails unless both ranks are here
    }
  }));
  EXPECT_EQ(triggers, (std::vector<int>{3, 3})) << "after steps 1, 5 and 9";
  EXPECT_EQ(ranks[0].step_count(), ranks[1].step_count());
  EXPECT_EQ(ranks[0].window(0).position(), 9 % 4);
  EXPECT_EQ(ranks[1].window(0).position(), 0) << "a dummy batch does not advance the window";
  EXPECT_EQ(ranks[1].window(0).sums()(0, 0), 0);
  EXPECT_EQ(ranks[1].load_pass(0)(0, 0), 0);
}

TEST(Balancer, B11_DifferentStepCountsAreAMismatchOnAllRanks) {
  std::deque<Balancer> ranks(3, Balancer({.window = 4, .step_interval = 100, .log_interval = 2}));
  for (auto& rank : ranks) rank.add_model("main", ExpertMaps::initial(1, 4, 2), 3);
  SelfGroup self;
  ranks[2].step({}, self);  // this rank made one step more
  auto const errors = on_ranks(3, [&](int r, ThreadGroup& group) { ranks[static_cast<std::size_t>(r)].step({.log_stats = true}, group); });
  for (auto const& error : errors) {
    ASSERT_TRUE(error);
    expect_error(ErrorCode::mismatch, "ranks disagree about the EPLB step: rank 0 has 75, rank 2 has 76",
                 [&] { std::rethrow_exception(error); });
  }
}

TEST(Balancer, DifferentMapsAreAMismatchOnAllRanks) {
  std::deque<Balancer> ranks(2, Balancer({}));
  for (int r = 0; r < 2; ++r) {
    Table<std::int32_t> map(std::vector<std::vector<std::int32_t>>{{0, 1, r, 1}});
    ranks[static_cast<std::size_t>(r)].add_model("main", ExpertMaps(map, 2), 2);
  }
  for (auto const &error : on_ranks(2, [&](int r, ThreadGroup& group) { ranks[static_cast<std::size_t>(r)].global_load(0, group); })) {
    ASSERT_TRUE(error);
    expect_error(ErrorCode::mismatch, "expert maps differ", [&] { std::rethrow_exception(error); });
  }
}

TEST(Balancer, ReportsTokensPerOwnerRankEverySoManySteps) {
  std::deque<Balancer> ranks(2, Balancer({.log_interval = 2}));
  for (auto& rank : ranks) rank.add_model("main", ExpertMaps::initial(2, 2, 0), 2);
  expect_none(on_ranks(2, [&](int r, ThreadGroup& group) {
    Balancer& mine = ranks[static_cast<std::size_t>(r)];
    mine.load_pass(0)(0, 0) = 15;  // physical expert 0 is on rank 0
    mine.load_pass(0)(0, 1) = 5;
    mine.load_pass(0)(1, 0) = 5;
    mine.load_pass(0)(1, 1) = 15;
    auto const outcome = mine.step({.log_stats = true}, group);
    ASSERT_EQ(outcome.reports.size(), 1u);
    EXPECT_EQ(outcome.reports[0].rank_tokens, Table<std::int64_t>(std::vector<std::vector<std::int64_t>>{{30, 10}, {10, 30}}));
    EXPECT_NEAR(outcome.reports[0].balancedness, 2.0 / 3.0, 1e-12);
    EXPECT_EQ(outcome.reports[0].per_layer.size(), 2u);
    EXPECT_TRUE(mine.step({.log_stats = true}, group).reports.empty()) << "every second one";
    EXPECT_EQ(mine.step({.log_stats = true}, group).reports.size(), 1u);
    EXPECT_TRUE(mine.step({}, group).reports.empty());
  }));
}

TEST(Balancer, B22_TwoModelsOneStepCounter) {
  Balancer balancer({.window = 2, .step_interval = 4});
  int const main = balancer.add_model("main", ExpertMaps::initial(3, 8, 4), 4);
  int const draft = balancer.add_model("draft", ExpertMaps::initial(1, 4, 0), 4);
  SelfGroup self;
  for (int e = 0; e < 8; ++e) balancer.load_pass(main)(2, e) = 1 + 10 * e;
  for (int e = 0; e < 4; ++e) balancer.load_pass(draft)(0, e) = 100 - e;
  EXPECT_TRUE(balancer.step({}, self).rearrange);
  EXPECT_EQ(balancer.step_count(), 0);
  EXPECT_EQ(balancer.global_load(main, self)(2, 7), 71);
  EXPECT_EQ(balancer.global_load(draft, self)(0, 3), 97);
  auto const proposal = balancer.propose(main, {.num_ranks = 4}, self);
  EXPECT_EQ(proposal.changed_layers, (std::vector<std::int32_t>{2})) << "the other layers saw no tokens";
  ExpertMaps const before = balancer.maps(draft);
  balancer.commit(main, proposal.maps);
  EXPECT_EQ(balancer.maps(main), proposal.maps);
  EXPECT_EQ(balancer.maps(draft), before);
  expect_error(ErrorCode::argument, "new maps of \"draft\" have another shape", [&] { balancer.commit(draft, proposal.maps); });
  expect_error(ErrorCode::config, "model \"draft\" is registered already",
               [&] { balancer.add_model("draft", ExpertMaps::initial(1, 4, 0), 4); });
  expect_error(ErrorCode::config, "P must be divisible by ep_size", [&] { balancer.add_model("odd", ExpertMaps::initial(1, 5, 0), 4); });
  expect_error(ErrorCode::argument, "model 2 is out of range [0, 2)", [&] { balancer.maps(2); });
}

TEST(Balancer, LoadsStayInTheLoadWindowWhenTheMapChanges) {
  Balancer balancer({.window = 2, .step_interval = 100});
  int const main = balancer.add_model("main", ExpertMaps::initial(1, 2, 0), 2);
  SelfGroup self;
  balancer.load_pass(main)(0, 0) = 7;  // expert 0
  balancer.step({}, self);
  balancer.commit(main, ExpertMaps(Table<std::int32_t>(std::vector<std::vector<std::int32_t>>{{1, 0}}), 2));
  balancer.load_pass(main)(0, 0) = 3;  // now expert 1
  balancer.step({}, self);
  EXPECT_EQ(balancer.global_load(main, self)(0, 0), 7);
  EXPECT_EQ(balancer.global_load(main, self)(0, 1), 3);
  balancer.replace(main, ExpertMaps::initial(1, 2, 1), 3);
  EXPECT_EQ(balancer.global_load(main, self)(0, 0), 0) << "another topology starts the window anew";
  for (int num_ranks : {0, 2}) {
    expect_error(ErrorCode::config, moe::text("P must be divisible by ep_size: P = 3, ep_size = ", num_ranks),
                 [&] { balancer.replace(main, ExpertMaps::initial(2, 2, 1), num_ranks); });
  }
  EXPECT_EQ(balancer.maps(main), ExpertMaps::initial(1, 2, 1)) << "a refusal changes nothing";
  EXPECT_EQ(balancer.load_pass(main).rows(), 1);
}

TEST(Balancer, BadOptions) {
  expect_error(ErrorCode::config, "eplb window must be greater than 0, is 0", [] { Balancer({.window = 0}); });
  expect_error(ErrorCode::config, "eplb step_interval must be greater than 0, is -1", [] { Balancer({.step_interval = -1}); });
  expect_error(ErrorCode::config, "eplb log_interval must be greater than 0, is 0", [] { Balancer({.log_interval = 0}); });
}

}  // namespace
