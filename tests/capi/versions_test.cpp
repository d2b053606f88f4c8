// SPDX-License-Identifier: Apache-2.0
// tests/capi/versions_test.cpp: structs of moe.h in the sizes of older versions: members that they lack are those of the initialiser, and
// what the library writes ends where they end.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "moe/c/structs.hpp"
#include "tests/capi/arguments.hpp"

namespace {

/// A struct that has grown twice.
struct Grown {
  std::uint64_t struct_size = sizeof(Grown);
  std::int64_t first = 1;
  std::int64_t second = 2;
  std::int64_t third = 3;
};

}  // namespace

template <>
struct moe::c::Versions<Grown> {
  static constexpr Grown kInitial{};
  static constexpr std::array kSizes{offsetof(Grown, second), offsetof(Grown, third), sizeof(Grown)};
};

namespace {

using namespace moe_test;

std::string refusal(auto const& call) {
  try {
    call();
  } catch (moe::Error const& e) {
    return e.what();
  }
  return "nothing was thrown";
}

TEST(Versions, MembersThatACallerLacksAreThoseOfTheInitialiser) {
  Grown const today{.first = 10, .second = 20, .third = 30};
  for (auto const& [size, second, third] : std::vector<std::array<std::int64_t, 3>>{{16, 2, 3}, {24, 20, 3}, {32, 20, 30}}) {
    Grown given = today;
    given.struct_size = static_cast<std::uint64_t>(size);
    Grown const full = moe::c::checked("grown", &given);
    EXPECT_EQ(full.struct_size, sizeof(Grown)) << size;
    EXPECT_EQ(full.first, 10) << size;
    EXPECT_EQ(full.second, second) << size;
    EXPECT_EQ(full.third, third) << size;
  }
}

TEST(Versions, OutputsEndWhereTheCallersStructEnds) {
  auto const fill = [](Grown& g) { g.first = 7, g.second = 8, g.third = 9; };
  for (std::uint64_t const size : {16, 24, 32}) {
    Grown out{.first = -1, .second = -2, .third = -3};
    out.struct_size = size;
    moe::c::write_struct("grown", &out, fill);
    EXPECT_EQ(out.struct_size, size);
    EXPECT_EQ(out.first, 7) << size;
    EXPECT_EQ(out.second, size >= 24 ? 8 : -2) << size;
    EXPECT_EQ(out.third, size >= 32 ? 9 : -3) << size;
  }
  Grown out;
  EXPECT_NE(
      refusal([&] { moe::c::write_struct("grown", &out, [](Grown&) { throw moe::Error(moe::ErrorCode::state, "later"); }); }).find("later"),
      std::string::npos);
  EXPECT_EQ(out.first, 1) << "an error writes nothing";
}

TEST(Versions, AnyOtherSizeIsRefused) {
  for (std::uint64_t const size : {0, 8, 20, 23, 31, 33, 40}) {
    Grown given;
    given.struct_size = size;
    std::string const said = refusal([&] { moe::c::checked("grown", &given); });
    EXPECT_NE(said.find(moe::text("grown: struct_size is ", size, ", this library knows 16, 24 and 32; begin from its initialiser")),
              std::string::npos)
        << said;
  }
}

// 112 bytes before the bounds of situ, 120 before workspace_of.
TEST(Versions, OlderConfigs) {
  static_assert(offsetof(moe_runner_config, activation_situ_gate) == 112 && offsetof(moe_runner_config, workspace_of) == 120);
  std::vector<float> first;
  for (std::uint64_t const size : {std::uint64_t{112}, std::uint64_t{120}, std::uint64_t{sizeof(moe_runner_config)}}) {
    SCOPED_TRACE(size);
    Arguments x;
    x.config.struct_size = size;
    x.config.activation = "situ";
    if (size < 120) x.config.activation_situ_gate = x.config.activation_situ_up = -1.0F;  // not the caller's memory: they are not read
    if (size < 128) x.config.workspace_of = reinterpret_cast<moe_runner_t>(std::uintptr_t{77});
    ASSERT_EQ(x.create(), MOE_OK) << moe_last_error();
    ASSERT_EQ(moe_runner_forward(x.runner, &x.hidden, &x.logits, &x.output, nullptr, nullptr), MOE_OK) << moe_last_error();
    if (first.empty()) first = x.a.output.values();
    EXPECT_EQ(x.a.output.values(), first);
    EXPECT_TRUE(std::ranges::any_of(first, [](float v) { return v != 0.0F; }));
  }
  for (std::uint64_t const size : {std::uint64_t{104}, std::uint64_t{116}, std::uint64_t{136}}) {
    Arguments x;
    x.config.struct_size = size;
    expect_refused(x.create(), MOE_E_ARG, {moe::text("config: struct_size is ", size, ", this library knows 112, 120 and 128")});
    expect_refused(moe_experts(&x.config, &x.weights, &x.hidden, &x.ids, &x.topk_weights, &x.output, nullptr), MOE_E_ARG,
                   {moe::text("config: struct_size is ", size)});
  }
}

}  // namespace
