// SPDX-License-Identifier: Apache-2.0
// tests/random_maps.hpp: random maps of experts to expert slots, for tests that move experts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>

#include "moe/eplb/maps.hpp"

namespace moe_test {

/// Maps in which every expert has an expert slot, equal on all ranks.
inline moe::eplb::ExpertMaps random_maps(int layers, int num_logical, int num_physical, unsigned seed) {
  std::mt19937 random(seed);
  moe::eplb::Table<std::int32_t> map(layers, num_physical);
  for (int layer = 0; layer < layers; ++layer) {
    auto const row = map.row(layer);
    std::iota(row.begin(), row.begin() + num_logical, 0);
    for (int p = num_logical; p < num_physical; ++p) row[static_cast<std::size_t>(p)] = static_cast<std::int32_t>(random()) & 0xffff;
    for (std::int32_t& e : row.subspan(static_cast<std::size_t>(num_logical))) e %= num_logical;
    std::shuffle(row.begin(), row.end(), random);
  }
  return moe::eplb::ExpertMaps(std::move(map), num_logical);
}

}  // namespace moe_test
