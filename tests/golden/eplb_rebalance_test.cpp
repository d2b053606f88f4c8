// SPDX-License-Identifier: Apache-2.0
// tests/golden/eplb_rebalance_test.cpp: placements equal the published implementation's, integer for integer, in both precisions.
#include "moe/eplb/balancedness.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "golden_dir.hpp"
#include "moe/eplb/rebalance.hpp"

namespace {

using moe::eplb::Arithmetic;
using moe::eplb::ExpertMaps;
using moe::eplb::Table;
using nlohmann::json;

std::vector<std::filesystem::path> files() {
  std::vector<std::filesystem::path> out;
  std::error_code none;
  for (auto const& entry : std::filesystem::directory_iterator(moe_test::golden_dir() / "eplb", none)) {
    if (entry.path().extension() == ".json") out.push_back(entry.path());
  }
  std::sort(out.begin(), out.end());
  return out;
}

// The maps in the layout of the files, whose logical_to_physical is as wide as the largest count.
json as_json(ExpertMaps const& maps) {
  auto const& counts = maps.replica_count().flat();
  auto const width = static_cast<std::size_t>(*std::max_element(counts.begin(), counts.end()));
  json out{{"physical_to_logical", json::array()}, {"logical_to_physical", json::array()}, {"logical_count", json::array()}};
  for (int layer = 0; layer < maps.num_layers(); ++layer) {
    out["physical_to_logical"].push_back(json(maps.physical_to_logical().row(layer)));
    out["logical_count"].push_back(json(maps.replica_count().row(layer)));
    json slots = json::array();
    for (int e = 0; e < maps.num_logical(); ++e) slots.push_back(json(maps.replicas_of(layer, e).first(width)));
    out["logical_to_physical"].push_back(slots);
  }
  return out;
}

class EplbGolden : public testing::TestWithParam<std::filesystem::path> {};

TEST_P(EplbGolden, IntegerForInteger) {
  json file;
  std::ifstream(GetParam()) >> file;
  Table<double> const load(file["weight"].get<std::vector<std::vector<double>>>());
  moe::eplb::Topology const topology{.num_physical = file["num_replicas"],
                                     .num_groups = file["num_groups"],
                                     .num_nodes = file["num_nodes"],
                                     .num_ranks = file["num_gpus"]};
  json const& expected = file.contains("stable_sort") ? file["stable_sort"] : file;
  for (Arithmetic arithmetic : {Arithmetic::float32, Arithmetic::float64}) {
    ExpertMaps const maps = moe::eplb::rebalance(load, topology, arithmetic);
    json const got = as_json(maps);
    for (char const* field : {"physical_to_logical", "logical_count", "logical_to_physical"}) {
      ASSERT_TRUE(expected.contains(field) || file.contains(field)) << field;
      EXPECT_EQ(got[field], expected.contains(field) ? expected[field] : file[field]) << field;
    }
    // Also the other sort's placement, where only copies of one expert tie.
    if (file["physical_to_logical_same_with_stable_sort"]) {
      EXPECT_EQ(got["physical_to_logical"], file["physical_to_logical"]);
      for (int layer = 0; layer < load.rows(); ++layer) {
        auto const ranks = moe::eplb::rank_loads(maps, layer, load.row(layer), topology.num_ranks);
        EXPECT_NEAR(1.0 / moe::eplb::balancedness(ranks), file["gpu_load_max_over_mean"][static_cast<std::size_t>(layer)].get<double>(),
                    1e-5);
      }
    }
  }
  EXPECT_EQ(name(moe::eplb::effective_topology(topology, load.cols()).second), file["policy"].get<std::string>());
}

INSTANTIATE_TEST_SUITE_P(Files, EplbGolden, testing::ValuesIn(files()), [](auto const& file) { return file.param.stem().string(); });

TEST(EplbGoldenFiles, ArePresent) { EXPECT_FALSE(files().empty()) << "no eplb/*.json under " << moe_test::golden_dir(); }

}  // namespace
