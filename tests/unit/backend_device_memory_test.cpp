// SPDX-License-Identifier: Apache-2.0
// tests/unit/backend_device_memory_test.cpp: the formulas of backends/common/memory.hpp for windows between GPUs against the layouts of
// these windows.
#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "moe/backends/common/memory.hpp"
#include "moe/backends/window/device/high_throughput/layout.hpp"
#include "moe/backends/window/device/low_latency/layout.hpp"
#include "moe/backends/window/device/one_sided/exchange.hpp"
#include "moe/backends/window/device/pplx/exchange.hpp"
#include "moe/backends/window/device/two_sided/exchange.hpp"

namespace {

using namespace moe::backends;
using moe::detail::HighThroughputLayout;
using moe::detail::HighThroughputShape;
using moe::detail::LowLatencyLayout;
using moe::detail::LowLatencyShape;
using moe::detail::PeerShape;

/// A formula and a layout at one size.
struct Window {
  std::int64_t formula;
  std::size_t layout;
  std::int64_t fixed() const { return static_cast<std::int64_t>(layout) - formula; }
};

/// What the formula leaves out (flags, counts, rounds) does not depend on the number of tokens and is less than 1 MiB.
/// at(size): the window at a size.
template <class At>
void expect_formula(std::string const& what, At&& at) {
  for (bool const fp8 : {false, true}) {
    for (auto const& [ranks, topk, local, hidden] : {std::tuple{1, 1, 8, 512}, {4, 8, 64, 7168}, {8, 6, 32, 4096}}) {
      SCOPED_TRACE(moe::text(what, ": fp8 ", fp8, ", ", ranks, " ranks, top ", topk, ", ", local, " experts a rank, hidden ", hidden));
      DeviceExchangeSize size{ranks, 128, topk, local, hidden, fp8};
      Window const small = at(size);
      EXPECT_GE(small.fixed(), static_cast<std::int64_t>(moe::comm::kWindowControlBytes));
      EXPECT_LT(small.fixed(), 1 << 20);
      for (int const tokens : {256, 4096}) {  // multiples of 128, so that every region ends on a multiple of 256 bytes
        size.max_tokens = tokens;
        EXPECT_EQ(at(size).fixed(), small.fixed()) << tokens << " tokens";
      }
    }
  }
}

int number(std::int64_t n) { return static_cast<int>(n); }
LowLatencyShape low_shape(DeviceExchangeSize const& s) {
  LowLatencyShape shape;
  shape.ranks = number(s.ranks);
  shape.max_tokens = number(s.max_tokens);
  shape.hidden = number(s.hidden);
  shape.topk = number(s.topk);
  shape.num_experts = number(s.ranks * s.local_experts);
  shape.fp8 = s.fp8;
  return shape;
}
PeerShape peer_shape(DeviceExchangeSize const& s) {
  return {.name = "",
          .ranks = number(s.ranks),
          .max_tokens = number(s.max_tokens),
          .hidden = number(s.hidden),
          .topk = number(s.topk),
          .num_experts = number(s.ranks * s.local_experts),
          .fp8 = s.fp8};
}

TEST(DeviceMemory, LowLatency) {
  expect_formula("plain", [](DeviceExchangeSize const& s) { return Window{low_latency_window(s), LowLatencyLayout(low_shape(s)).bytes}; });
  expect_formula("masks", [](DeviceExchangeSize const& s) {
    LowLatencyShape shape = low_shape(s);
    shape.masks = true;
    return Window{low_latency_window(s, 1, true), LowLatencyLayout(shape).bytes};
  });
  expect_formula("two buffer sets", [](DeviceExchangeSize const& s) {
    LowLatencyLayout const first(low_shape(s));
    return Window{low_latency_window(s, 2), LowLatencyLayout(low_shape(s), first.bytes).bytes};
  });
  for (CombineFormat const format : {CombineFormat::fp8, CombineFormat::logfmt}) {
    expect_formula(std::string(name(format)), [&](DeviceExchangeSize const& s) {
      LowLatencyShape shape = low_shape(s);
      shape.combine = format;
      auto const coded = moe::detail::combine_row_bytes(format, shape.hidden) + 4 * shape.groups();
      return Window{low_latency_window(s, 1, false, coded), LowLatencyLayout(shape).bytes};
    });
  }
}

TEST(DeviceMemory, LowLatencyDeduplicatedAndRankMajor) {
  expect_formula("per rank", [](DeviceExchangeSize const& s) {
    LowLatencyShape shape = low_shape(s);
    shape.per_rank = true;
    return Window{low_latency_deduplicated_window(s), LowLatencyLayout(shape).bytes};
  });
}

TEST(DeviceMemory, HighThroughput) {
  auto const window = [](DeviceExchangeSize const& s, int alignment, int capacity) {
    HighThroughputShape shape;
    shape.ranks = number(s.ranks);
    shape.max_tokens = number(s.max_tokens);
    shape.hidden = number(s.hidden);
    shape.topk = number(s.topk);
    shape.num_experts = number(s.ranks * s.local_experts);
    shape.fp8 = s.fp8;
    shape.lists = alignment > 0;
    shape.alignment = alignment > 0 ? alignment : 1;
    shape.capacity = capacity;
    return Window{high_throughput_window(s, capacity, alignment), HighThroughputLayout(shape).bytes};
  };
  for (int const alignment : {0, 1, 64}) {
    expect_formula(moe::text("alignment ", alignment), [&](DeviceExchangeSize const& s) { return window(s, alignment, 0); });
  }
  expect_formula("half the rows", [&](DeviceExchangeSize const& s) { return window(s, 1, number(s.rows() / 2)); });
}

TEST(DeviceMemory, OneSided) {
  expect_formula("one_sided",
                 [](DeviceExchangeSize const& s) { return Window{one_sided_window(s), moe::detail::OneSidedLayout(peer_shape(s)).bytes}; });
}

TEST(DeviceMemory, TwoSided) {
  expect_formula("two_sided", [](DeviceExchangeSize const& s) {
    moe::detail::TwoSidedQueues const queues{8, 64 * 1024};
    moe::detail::TwoSidedLayout const at(peer_shape(s), queues);
    return Window{two_sided_window(s, at.queues, queues.depth, queues.entry_bytes), at.bytes};
  });
}

TEST(DeviceMemory, Pplx) {
  for (int const dp : {1, 2}) {
    expect_formula(moe::text("groups of ", dp), [&](DeviceExchangeSize const& s) {
      return Window{pplx_window(s, dp), moe::detail::PplxLayout(peer_shape(s), {dp, false}).bytes};
    });
  }
}

}  // namespace
