// SPDX-License-Identifier: Apache-2.0
// runner/capture.hpp: whether a runner's forward() can be captured in a CUDA graph.
#pragma once

#include <string>

#include "moe/layer/capture.hpp"

namespace moe {

template <class LayerT, class PartsT>
class Runner;

/// Why a runner's forward() cannot be captured, as a sentence: its layer's obstacle, else the first one of its own parts; empty if it can.
/// `runner`: in the CUDA space.
template <class LayerT, class PartsT>
std::string capture_obstacle(Runner<LayerT, PartsT>& runner) {
  return runner.capture_obstacle();
}

}  // namespace moe
