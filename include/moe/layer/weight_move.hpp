// SPDX-License-Identifier: Apache-2.0
// layer/weight_move.hpp: a layer's forwards are refused while its weights are being moved (load balancing).
#pragma once

#include <atomic>

#include "moe/core/error.hpp"

namespace moe {

/// Whether a layer's weights and the map that belongs to them are being replaced. Set by the thread that moves them; read by
/// every forward() on any thread: by a runner and by its layer, in each pass of chunks. The replay of a graph is not covered: it must have
/// ended, or precede the move in its stream.
class WeightMove {
 public:
  /// `layer`: its number in the model, at least 0, for the error.
  void begin(int layer) noexcept { layer_.store(layer, std::memory_order_release); }
  void end() noexcept { layer_.store(kNone, std::memory_order_release); }
  /// E_STATE between begin() and end(). Host space: a forward that passes sees the new weights. CUDA space: the copies have been enqueued,
  /// and the forward must follow them in their stream.
  void expect_none() const {
    int const layer = layer_.load(std::memory_order_acquire);
    if (layer == kNone) return;
    throw Error(ErrorCode::state, text("forward: the weights of layer ", layer,
                                       " are being moved. Fix: call it before the move (step(), move_to(), rearrange()) or after it"));
  }

 private:
  static constexpr int kNone = -1;
  std::atomic<int> layer_{kNone};
};

}  // namespace moe
