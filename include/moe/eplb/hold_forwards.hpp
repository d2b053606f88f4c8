// SPDX-License-Identifier: Apache-2.0
// eplb/hold_forwards.hpp: no forward begins while a layer's weights are being moved.
#pragma once

#include <span>

#include "moe/layer/weight_move.hpp"

namespace moe::eplb {

/// During its lifetime, a forward() of these layers or runners that begins on this rank throws E_STATE. A program that calls
/// WeightMover::commit() itself keeps one from before commit() until the new map is in use and weights_changed() was called. rearrange()
/// takes a function that makes one; with one layer:
///
///     std::array const users{&runner.weight_move()};
///     rearrange(mover, maps, next, group, commit, stream, [&](int layer) { return HoldForwards(layer, users); });
class HoldForwards {
 public:
  /// layer: its number in the model, at least 0, for the error. users: those whose weights are this layer's; the array and what it points
  /// to must outlive this object.
  HoldForwards(int layer, std::span<WeightMove* const> users) : users_(users) {
    for (WeightMove* user : users_) user->begin(layer);
  }
  ~HoldForwards() {
    for (WeightMove* user : users_) user->end();
  }
  HoldForwards(HoldForwards const&) = delete;
  HoldForwards& operator=(HoldForwards const&) = delete;

 private:
  std::span<WeightMove* const> users_;
};

/// Refuses no forward: the caller must not call one during the move.
struct HoldNone {
  HoldForwards operator()(int layer) const { return {layer, {}}; }
};

}  // namespace moe::eplb
