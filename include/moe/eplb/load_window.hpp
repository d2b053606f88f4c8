// SPDX-License-Identifier: Apache-2.0
// eplb/load_window.hpp: how many tokens each logical expert received over the last steps.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/eplb/maps.hpp"

namespace moe::eplb {

/// load [layers, P], tokens per physical expert, to tokens per logical expert [layers, E], under the maps in use while counting.
/// E_ARG if the shapes differ or a count is negative.
inline Table<std::int64_t> to_logical(Table<std::int32_t> const& load, ExpertMaps const& maps) {
  if (load.rows() != maps.num_layers() || load.cols() != maps.num_physical()) {
    throw Error(ErrorCode::argument, text("load is [", load.rows(), ", ", load.cols(), "], the maps are of [", maps.num_layers(), ", ",
                                          maps.num_physical(), "]"));
  }
  Table<std::int64_t> out(maps.num_layers(), maps.num_logical());
  for (int layer = 0; layer < load.rows(); ++layer) {
    for (int slot = 0; slot < load.cols(); ++slot) {
      std::int32_t const tokens = load(layer, slot);
      if (tokens < 0) {
        throw Error(ErrorCode::argument, text("load of physical expert ", slot, " in layer ", layer, " must be at least 0, is ", tokens));
      }
      std::int32_t const e = maps.physical_to_logical()(layer, slot);
      if (e != kEmptySlot) out(layer, e) += tokens;
    }
  }
  return out;
}

/// A ring of the last W steps. Loads are stored by logical expert, so that a new placement does not invalidate them. Host memory,
/// W · layers · E integers of 64 bits (one step of replicas may pass 2^31), all taken at construction.
class LoadWindow {
 public:
  /// E_CONFIG on window < 1.
  LoadWindow(int window, int num_layers, int num_logical) : sums_(num_layers, num_logical) {
    if (window < 1) throw Error(ErrorCode::config, text("eplb window must be greater than 0, is ", window));
    steps_.assign(static_cast<std::size_t>(window), Table<std::int64_t>(num_layers, num_logical));
  }

  /// Replaces the oldest step. tokens [layers, E]. E_ARG on another shape.
  void record(Table<std::int64_t> const& tokens) {
    if (tokens.rows() != sums_.rows() || tokens.cols() != sums_.cols()) {
      throw Error(ErrorCode::argument, text("load is [", tokens.rows(), ", ", tokens.cols(), "], the load window's steps are [",
                                            sums_.rows(), ", ", sums_.cols(), "]"));
    }
    auto& oldest = steps_[static_cast<std::size_t>(position_)].flat();
    for (std::size_t i = 0; i < oldest.size(); ++i) {
      sums_.flat()[i] += tokens.flat()[i] - oldest[i];
      oldest[i] = tokens.flat()[i];
    }
    position_ = (position_ + 1) % size();
  }
  void clear() {
    for (auto& step : steps_) std::fill(step.flat().begin(), step.flat().end(), 0);
    std::fill(sums_.flat().begin(), sums_.flat().end(), 0);
    position_ = 0;
  }

  int size() const { return static_cast<int>(steps_.size()); }
  /// Index of the next step to write.
  int position() const { return position_; }
  /// [layers, E]: sums over the load window, of this rank's tokens.
  Table<std::int64_t> const& sums() const { return sums_; }

 private:
  std::vector<Table<std::int64_t>> steps_;
  Table<std::int64_t> sums_;
  int position_ = 0;
};

/// Integer loads as rebalance() takes them.
inline Table<double> to_load(Table<std::int64_t> const& tokens) {
  Table<double> out(tokens.rows(), tokens.cols());
  std::copy(tokens.flat().begin(), tokens.flat().end(), out.flat().begin());
  return out;
}

}  // namespace moe::eplb
