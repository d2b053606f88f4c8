// SPDX-License-Identifier: Apache-2.0
// tests/unit/backend_handle_table_test.cpp: handles to dispatches: which are live, in which order they may be used, which refusals are
// pending.
#include "moe/backends/common/handle_table.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "expect_error.hpp"

namespace {

using moe::ErrorCode;
using moe::detail::DispatchState;
using moe::detail::Handle;
using moe_test::expect_error;

struct Record : moe::detail::DispatchRecord {
  int value = 0;
};

struct Table : moe::detail::HandleTable<Record> {
  explicit Table(int buffer_sets = 1, std::uint32_t first = 0)
      : HandleTable(buffer_sets), counters(static_cast<std::size_t>(buffer_sets), first) {
    for (int s = 0; s < buffer_sets; ++s) set_counter(s, &counters[static_cast<std::size_t>(s)]);
  }
  std::vector<std::uint32_t> counters;
};

bool same(std::optional<Handle> const& a, Handle b) { return a && a->buffer_set == b.buffer_set && a->generation == b.generation; }

TEST(HandleTable, RecordsAlternateAndAHandleIsStaleAfterTwoDispatches) {
  Table t;
  Handle const a = t.open_counted(0, DispatchState::received);
  t.record(a).value = 7;
  EXPECT_EQ(a.generation, 1U);
  EXPECT_EQ(a.parity(), 1);
  Handle const b = t.open_counted(0, DispatchState::received);
  EXPECT_NE(&t.record(a), &t.record(b));
  EXPECT_EQ(t.expect(a, DispatchState::received, "finalize").value, 7);
  Handle const c = t.open_counted(0, DispatchState::received);
  EXPECT_EQ(&t.record(a), &t.record(c));
  EXPECT_FALSE(t.live(a));
  expect_error(ErrorCode::state, "finalize: the handle is stale, 2 dispatches of its buffer set have followed, at most 1",
               [&] { t.expect(a, DispatchState::received, "finalize"); });
}

TEST(HandleTable, ADispatchThatIsNotCountedYetIsLive) {
  Table t;
  Handle const a = t.open(0, DispatchState::sent);
  EXPECT_EQ(t.counters[0], 0U);
  t.expect(a, DispatchState::sent, "receive");
  EXPECT_TRUE(same(t.oldest(), a));
  Handle const again = t.open(0, DispatchState::sent);  // the previous dispatch was refused, and so not counted
  EXPECT_EQ(again.generation, a.generation);
}

TEST(HandleTable, GenerationsWrap) {
  Table t(1, std::numeric_limits<std::uint32_t>::max() - 1);
  Handle const a = t.open_counted(0, DispatchState::received);
  Handle const b = t.open_counted(0, DispatchState::received);
  EXPECT_EQ(b.generation, 0U);
  EXPECT_TRUE(t.live(a));
  EXPECT_TRUE(same(t.oldest(), a));
  t.open_counted(0, DispatchState::received);
  EXPECT_FALSE(t.live(a));
  EXPECT_TRUE(same(t.oldest(), b));
}

TEST(HandleTable, RefusesWrongBufferSetsStatesAndHandlesNeverGiven) {
  Table t(2);
  for (int buffer_set : {-1, 2}) {
    expect_error(ErrorCode::argument, "out of range [0, 2)", [&] { t.open(buffer_set, DispatchState::sent); });
    expect_error(ErrorCode::argument, "out of range [0, 2)", [&] { t.expect({buffer_set, 1}, DispatchState::sent, "receive"); });
  }
  expect_error(ErrorCode::state, "called out of order for this handle", [&] { t.expect({}, DispatchState::received, "finalize"); });
  Handle const a = t.open_counted(1, DispatchState::sent);
  expect_error(ErrorCode::state, "called out of order for this handle", [&] { t.expect(a, DispatchState::received, "finalize"); });
  expect_error(ErrorCode::state, "called out of order for this handle",
               [&] { t.expect({0, a.generation}, DispatchState::sent, "receive"); });
  expect_error(ErrorCode::state, "called out of order for this handle",
               [&] { t.expect({1, a.generation + 1}, DispatchState::sent, "receive"); });
  EXPECT_TRUE(t.sent(1));
  EXPECT_FALSE(t.sent(0));
}

TEST(HandleTable, TheOldestIsByDispatchNotByBufferSet) {
  Table t(2);
  EXPECT_FALSE(t.oldest());
  Handle const a = t.open_counted(1, DispatchState::received);
  Handle const b = t.open_counted(0, DispatchState::received);
  Handle const c = t.open_counted(1, DispatchState::received);
  EXPECT_TRUE(same(t.oldest(), a));
  t.record(a).state = DispatchState::idle;
  EXPECT_TRUE(same(t.oldest(), b));
  t.counters[0] += 2;  // rounds of another exchange over the window
  EXPECT_TRUE(same(t.oldest(), c));
}

TEST(HandleTable, ARefusalIsDueOnceTheDispatchBeforeItIsCombined) {
  Table t;
  Handle const a = t.open_counted(0, DispatchState::received);
  Handle const refused = t.open_counted(0, DispatchState::idle);
  t.refuse(refused, 5);
  EXPECT_FALSE(t.take_refusal(0)) << "the combine of the dispatch before comes first on all ranks";
  t.record(a).state = DispatchState::idle;
  auto const due = t.take_refusal(0);
  ASSERT_TRUE(due);
  EXPECT_EQ(due->handle.generation, refused.generation);
  EXPECT_EQ(due->code, 5U);
  EXPECT_FALSE(t.take_refusal(0)) << "once";
  t.refuse(t.open_counted(0, DispatchState::idle), 6);
  EXPECT_TRUE(t.take_refusal(0)) << "nothing before it is under way";
}

TEST(HandleTable, ResetForgetsDispatchesAndRefusals) {
  Table t;
  Handle const a = t.open_counted(0, DispatchState::received);
  t.refuse(t.open_counted(0, DispatchState::idle), 5);
  t.reset();
  t.counters[0] = 0;
  EXPECT_FALSE(t.oldest());
  EXPECT_FALSE(t.take_refusal(0));
  expect_error(ErrorCode::state, "called out of order for this handle", [&] { t.expect(a, DispatchState::received, "finalize"); });
  EXPECT_EQ(t.open_counted(0, DispatchState::sent).generation, 1U);
}

}  // namespace
