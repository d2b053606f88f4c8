// SPDX-License-Identifier: Apache-2.0
// layer/capture.hpp: whether a layer's forward() can be captured in a CUDA graph, and the error if it cannot.
#pragma once

#include <string>

#include "moe/core/contract/facts.hpp"
#include "moe/core/error.hpp"
#include "moe/core/space.hpp"

namespace moe {

/// Whether a stream of a memory space is being captured. Defined in core/stream_capture.hpp, which policies that cannot be captured
/// include.
template <class Space>
struct StreamCapture;

/// Why a layer's forward() cannot be captured, as a sentence; empty if it can. `layer`: a ModularKernel in the CUDA space.
template <class Layer>
std::string capture_obstacle(Layer& layer) {
  if (!facts::capturable(layer.exchange())) {
    return text(Layer::Backend::kName, " reads exact sizes on the host; choose fixed sizes in its Params");
  }
  if (!facts::capturable(layer.kernel())) {
    return text(Layer::Experts::kName, " reads the rows per expert back; set Params::fixed_groups, or choose other experts");
  }
  return {};
}

/// Whether capture_obstacle() is empty.
template <class Layer>
bool is_capturable(Layer& layer) {
  return facts::capturable(layer.exchange()) && facts::capturable(layer.kernel());
}

/// E_STATE if `stream` is being captured and the layer's forward() cannot be. Before any work, and the other ranks are not told: a group
/// captures on all of its ranks.
template <class Layer>
void expect_capturable([[maybe_unused]] Layer& layer, [[maybe_unused]] Stream<typename Layer::Space> stream) {
  using Space = typename Layer::Space;
  if constexpr (Space::kKind == SpaceKind::cuda) {
    if constexpr (facts::may_not_capture<typename Layer::Exchange>() || facts::may_not_capture<typename Layer::Kernel>()) {
      if (is_capturable(layer) || !StreamCapture<Space>::is_active(stream)) return;
      throw Error(ErrorCode::state, text("capture: ", capture_obstacle(layer)));
    }
  }
}

}  // namespace moe
