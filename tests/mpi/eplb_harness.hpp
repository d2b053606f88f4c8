// SPDX-License-Identifier: Apache-2.0
// tests/mpi/eplb_harness.hpp: expert arrays whose bytes encode layer, expert, array and position, and maps to move them between.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "moe/core/array.hpp"
#include "moe/eplb/expert_tensors.hpp"
#include "moe/eplb/maps.hpp"
#include "tests/random_maps.hpp"

namespace moe_test {

using moe::eplb::ExpertMaps;
using moe::eplb::Table;
using Ids = std::vector<std::int32_t>;

/// The weights of one rank: per layer codes of three sizes, scales whose rows lie apart, and biases; `wide`: bytes of the largest.
class PatternWeights {
 public:
  PatternWeights(int layers, int slots, int wide) : slots_(slots) {
    for (int l = 0; l < layers; ++l) {
      layers_.emplace_back();
      // Layers of different sizes; the last array has 4 bytes more between experts than it moves.
      for (int size : {wide + 8 * l, wide / 2, 12, 4, 20}) layers_.back().push_back({size, size == 20 ? 24 : size, {}});
      for (Array& a : layers_.back()) a.bytes.assign(static_cast<std::size_t>(a.stride * slots), kUntouched);
    }
  }
  static unsigned char byte(int layer, int expert, std::size_t array, int i) {
    std::uint32_t const key = static_cast<std::uint32_t>(((layer * 1009 + expert) * 31 + static_cast<int>(array)) * 4099 + i);
    return static_cast<unsigned char>(key * 2654435761U >> 24U);
  }
  /// As if loaded for the map [R · L] of a layer.
  void load(int layer, std::span<std::int32_t const> map, int rank) {
    for (int s = 0; s < slots_; ++s) {
      std::int32_t const e = map[static_cast<std::size_t>(rank * slots_ + s)];
      for (std::size_t t = 0; t < at(layer).size(); ++t) {
        Array& a = at(layer)[t];
        for (int i = 0; i < a.size; ++i) a.bytes[static_cast<std::size_t>(s * a.stride + i)] = e < 0 ? kUntouched : byte(layer, e, t, i);
      }
    }
  }
  void load(ExpertMaps const& maps, int rank) {
    for (int l = 0; l < maps.num_layers(); ++l) load(l, maps.physical_to_logical().row(l), rank);
  }
  /// Every byte matches the map, and the gaps between experts are unchanged. Returns the first difference, or "".
  std::string check(int layer, std::span<std::int32_t const> map, int rank) const {
    for (int s = 0; s < slots_; ++s) {
      std::int32_t const e = map[static_cast<std::size_t>(rank * slots_ + s)];
      if (e < 0) continue;
      for (std::size_t t = 0; t < layers_[static_cast<std::size_t>(layer)].size(); ++t) {
        Array const& a = layers_[static_cast<std::size_t>(layer)][t];
        for (int i = 0; i < a.stride; ++i) {
          unsigned char const got = a.bytes[static_cast<std::size_t>(s * a.stride + i)];
          if (got != (i < a.size ? byte(layer, e, t, i) : kUntouched)) {
            return moe::text("layer ", layer, ", rank ", rank, ", expert slot ", s, ", expert ", e, ", array ", t, ", byte ", i);
          }
        }
      }
    }
    return "";
  }
  std::string check(ExpertMaps const& maps, int rank) const {
    for (int l = 0; l < maps.num_layers(); ++l) {
      if (std::string wrong = check(l, maps.physical_to_logical().row(l), rank); !wrong.empty()) return wrong;
    }
    return "";
  }
  std::vector<moe::eplb::LayerTensors> tensors() {
    std::vector<moe::eplb::LayerTensors> out;
    for (auto& layer : layers_) {
      out.emplace_back();
      for (std::size_t t = 0; t < layer.size(); ++t) {
        out.back().push_back(moe::eplb::expert_tensor(
            moe::text("array", t), moe::make_strided_rows(layer[t].bytes.data(), slots_, layer[t].size, layer[t].stride)));
      }
    }
    return out;
  }

 private:
  static constexpr unsigned char kUntouched = 0x5a;
  struct Array {
    int size, stride;
    std::vector<unsigned char> bytes;
  };
  std::vector<Array>& at(int layer) { return layers_[static_cast<std::size_t>(layer)]; }
  int slots_;
  std::vector<std::vector<Array>> layers_;
};

}  // namespace moe_test
