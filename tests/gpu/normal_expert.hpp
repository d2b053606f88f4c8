// SPDX-License-Identifier: Apache-2.0
// tests/gpu/normal_expert.hpp: the weights of an expert, the same in every store.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace moe_test {

/// Sets the weights of expert `e` at `slot` of a store: normal values over the square root of the width that they sum.
template <class Store>
void set_normal_expert(Store& store, std::int64_t slot, int e, int hidden, int intermediate) {
  std::mt19937 gen(static_cast<unsigned>(e) + 5);
  std::normal_distribution<float> normal;
  auto const size = static_cast<std::size_t>(intermediate) * static_cast<std::size_t>(hidden);
  std::vector<float> w13(2 * size), w2(size);
  for (float& v : w13) v = normal(gen) / std::sqrt(static_cast<float>(hidden));
  for (float& v : w2) v = normal(gen) / std::sqrt(static_cast<float>(intermediate));
  store.set_expert(slot, w13.data(), w2.data());
}

}  // namespace moe_test
