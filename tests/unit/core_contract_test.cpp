// SPDX-License-Identifier: Apache-2.0
// tests/unit/core_contract_test.cpp: every backend whose exchange is in another header names a header that exists, in either space;
// optional facts have their defaults; archetypes model the contracts.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "../archetypes.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/high_throughput.hpp"
#include "moe/backends/low_latency.hpp"
#include "moe/backends/naive.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/backends/one_sided.hpp"
#include "moe/backends/pplx.hpp"
#include "moe/backends/two_sided.hpp"

namespace {

using namespace moe_test;

/// The minimal window for a policy, in either space.
template <class SpaceT>
struct Window {
  using Space = SpaceT;
  using Comm = moe::comm::Self<Space>;
  int rank() const;
  int size() const;
  void* peer(int rank, std::int64_t offset);
  std::int64_t bytes() const;
};

/// The error text of a layer over Backend without the header of its exchange.
template <class Backend>
std::string sentence() {
  using Exchange = typename Backend::template Exchange<Tiny, ArchetypeQuantization<>, float>;
  return Exchange::MissingInclude::kSentence;
}

template <class Space>
std::vector<std::string> sentences() {
  using W = Window<Space>;
  return {sentence<moe::backends::LowLatency<W>>(),     sentence<moe::backends::LowLatencyRankMajor<W>>(),
          sentence<moe::backends::HighThroughput<W>>(), sentence<moe::backends::OneSided<W>>(),
          sentence<moe::backends::TwoSided<W>>(),       sentence<moe::backends::Pplx<W>>()};
}

TEST(Contract, AMissingIncludeNamesAHeaderThatExists) {
  using Cuda = moe::space::cuda;
  std::vector<std::string> all = sentences<moe::space::host>();
  for (std::string const& one : all) EXPECT_NE(one.find("moe/backends/window/host/"), std::string::npos) << one;
  for (std::string const& one : sentences<Cuda>()) {
    EXPECT_NE(one.find("moe/backends/window/device/"), std::string::npos) << one;
    all.push_back(one);
  }
  all.push_back(sentence<moe::backends::NoExpertParallel<Cuda>>());
  all.push_back(sentence<moe::backends::AllToAllV<moe::comm::Self<Cuda>>>());
  all.push_back(sentence<moe::backends::Naive<moe::comm::Self<Cuda>>>());
  all.push_back(sentence<moe::backends::AllGatherReduceScatter<moe::comm::Self<Cuda>>>());
  std::filesystem::path const include = std::filesystem::path(MOE_TEST_DATA) / ".." / ".." / "include";
  for (std::string const& one : all) {
    std::size_t const begin = one.find("#include <"), end = one.find('>', begin);
    ASSERT_NE(begin, std::string::npos) << one;
    std::string const header = one.substr(begin + 10, end - begin - 10);
    EXPECT_TRUE(std::filesystem::exists(include / header)) << one;
  }
  EXPECT_EQ(all.size(), 16U);
}

// A policy that states no optional fact has the default of each.
struct Silent {};
struct Loud {
  static constexpr bool kRowsStay = true, kTakesRowCount = true, kSkipsForeignIds = true, kBatchInvariant = true;
  static constexpr int kSharedMemoryLimit = 7;
  using RowsAsTheyAre = float;
  bool deduplicate = true;
  int waited = 0, checked = 0, changed = 0;
  void wait(int) { ++waited; }
  void check() { ++checked; }
  void weights_changed(int) { ++changed; }
  int expert_output() { return 1; }
  int expert_output(int output) { return output; }
};
struct OwnOutput {
  int expert_output() { return 1; }
};

TEST(Contract, OptionalFactsHaveDefaults) {
  namespace facts = moe::facts;
  EXPECT_FALSE(facts::rows_stay<Silent>());
  EXPECT_FALSE(facts::takes_row_count<Silent>());
  EXPECT_FALSE(facts::skips_foreign_ids<Silent>());
  EXPECT_FALSE(facts::experts_are_batch_invariant<Silent>());
  EXPECT_TRUE(facts::backend_is_batch_invariant<Silent>());
  EXPECT_TRUE((facts::carries_element<Silent, float>()));
  EXPECT_TRUE((facts::returns_element<Silent, float>()));
  EXPECT_FALSE(facts::deduplicates(Silent{}));
  EXPECT_EQ(facts::shared_memory_limit<Silent>(), 0);
  EXPECT_EQ((facts::shared_memory_bytes<Silent, Tiny, int>()), 0);
  EXPECT_TRUE((std::is_same_v<facts::RowsRead<Silent, int>::type, int>));
  Silent silent;
  EXPECT_EQ(facts::window_bytes(silent), 0U);
  facts::wait(silent, 0);
  facts::check(silent);
  facts::weights_changed(silent, 0);
  OwnOutput own;
  EXPECT_EQ(facts::expert_output(own, 5), 1);
}

TEST(Contract, OptionalFactsAreRead) {
  namespace facts = moe::facts;
  EXPECT_TRUE(facts::rows_stay<Loud>() && facts::takes_row_count<Loud>() && facts::skips_foreign_ids<Loud>());
  EXPECT_TRUE(facts::experts_are_batch_invariant<Loud>());
  EXPECT_EQ(facts::shared_memory_limit<Loud>(), 7);
  EXPECT_TRUE((std::is_same_v<facts::RowsRead<Loud, int>::type, float>));
  EXPECT_TRUE(facts::deduplicates(Loud{}));
  Loud loud;
  EXPECT_EQ(facts::expert_output(loud, 5), 5);
  facts::wait(loud, 0);
  facts::check(loud);
  facts::weights_changed(loud, 0);
  EXPECT_EQ(loud.waited + loud.checked + loud.changed, 3);
}

TEST(Contract, RunTimeReasonNamesTheMember) {
  struct NoTopK : ArchetypeRouter<> {
    using ArchetypeRouter::ArchetypeRouter;
    void topk() = delete;
  };
  using Composed = moe::Composition<Tiny, NoTopK, ArchetypeQuantization<>, ArchetypeBackend<>, ArchetypeExperts<>>;
  ASSERT_FALSE(Composed::kLegal);
  EXPECT_NE(std::string(Composed::reason()).find("'int topk() const'"), std::string::npos) << Composed::reason();
}

}  // namespace
