// SPDX-License-Identifier: Apache-2.0
// eplb/hold_forwards.hpp: no forward begins while a layer's weights are being moved.
#pragma once

#include <span>

#include "moe/layer/weight_move.hpp"

namespace moe::eplb {

/// While it lives, a forward() of these layers or runners is E_STATE. Whoever moves weights itself holds one from WeightMover::commit()
/// until the new map is in use and weights_changed() has been called; rearrange() takes a function that makes one:
///
///     std::array const users{&runner.weight_move()};
///     rearrange(mover, maps, next, group, commit, stream, [&](int layer) { return HoldForwards(layer, users); });
class HoldForwards {
 public:
  /// users: borrowed, also the array.
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

/// Holds no forward back: the caller makes none meanwhile.
struct HoldNone {
  HoldForwards operator()(int layer) const { return {layer, {}}; }
};

}  // namespace moe::eplb
