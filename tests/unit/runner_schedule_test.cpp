// SPDX-License-Identifier: Apache-2.0
// tests/unit/runner_schedule_test.cpp: the schedules of a dual batch: which order is complete, and which steps wait for the other queue.
#include "moe/runner/schedule.hpp"

#include <gtest/gtest.h>

#include <set>
#include <utility>

namespace {

using namespace moe::runner;

/// The pairs (step, step that it waits for).
template <class Steps>
std::set<std::pair<std::size_t, int>> waits_of(Steps const& steps) {
  std::set<std::pair<std::size_t, int>> out;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    if (waits(steps, i)) out.insert({i, predecessor(steps, i)});
  }
  return out;
}

TEST(Schedule, DeviceWaits) {
  // Both halves: experts for the dispatch, combine for the experts. The shared experts wait for nothing.
  EXPECT_EQ(waits_of(kDeviceDualBatch), (std::set<std::pair<std::size_t, int>>{{5, 1}, {6, 5}, {8, 3}, {9, 8}}));
  for (std::size_t i = 0; i < kDeviceDualBatch.size(); ++i) {
    EXPECT_EQ(is_awaited(kDeviceDualBatch, i), i == 1 || i == 3 || i == 5 || i == 8) << i;
  }
}

TEST(Schedule, AHalfIsUnderWayWhileTheOtherComputes) {
  for (auto const& steps : {kHostDualBatch, kDeviceDualBatch}) {
    for (std::size_t i = 0; i < steps.size(); ++i) {
      if (steps[i].stage != Stage::experts) continue;
      Part const other = steps[i].part == Part::first ? Part::second : Part::first;
      int const last = predecessor(steps, i);
      EXPECT_EQ(steps[static_cast<std::size_t>(last)].stage, Stage::dispatch_receive);
      bool sent = false;
      for (std::size_t j = 0; j < i; ++j) {
        sent = sent || (steps[j].part == other && (steps[j].stage == Stage::dispatch_send || steps[j].stage == Stage::combine_send));
      }
      EXPECT_TRUE(sent);
    }
  }
}

TEST(Schedule, IncompleteSchedules) {
  for (std::size_t i = 0; i < kHostDualBatch.size(); ++i) {
    auto twice = kHostDualBatch;  // a step twice instead of another
    twice[i] = twice[(i + 1) % twice.size()];
    EXPECT_FALSE(is_complete(twice)) << i;
  }
  auto swapped = kHostDualBatch;
  std::swap(swapped[0].part, swapped[1].part);
  EXPECT_TRUE(is_complete(swapped)) << "the halves may come in any order";
  std::swap(swapped[3], swapped[4]);
  EXPECT_FALSE(is_complete(swapped)) << "experts before their rows";
}

}  // namespace
