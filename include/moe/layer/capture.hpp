// SPDX-License-Identifier: Apache-2.0
// layer/capture.hpp: whether a layer's forward() can be captured in a CUDA graph, and the refusal where it cannot.
#pragma once

#include <string>

#include "moe/core/error.hpp"
#include "moe/core/space.hpp"

namespace moe {

/// Of a memory space: core/stream_capture.hpp, which policies that cannot be captured include.
template <class Space>
struct StreamCapture;

/// Whether a part of the layer says if it can be captured. The others can.
template <class Layer>
inline constexpr bool kMayNotCapture =
    requires(Layer& layer) { layer.exchange().capturable(); } || requires(Layer& layer) { layer.kernel().capturable(); };

/// Why a layer's forward() cannot be captured, as a sentence; empty if it can. `layer`: a ModularKernel in the CUDA space.
template <class Layer>
std::string capture_obstacle(Layer& layer) {
  if constexpr (requires { layer.exchange().capturable(); }) {
    if (!layer.exchange().capturable()) {
      return text(Layer::Backend::kName, " reads exact sizes on the host; choose fixed sizes in its Params");
    }
  }
  if constexpr (requires { layer.kernel().capturable(); }) {
    if (!layer.kernel().capturable()) {
      return text(Layer::Experts::kName, " reads the rows per expert back; set Params::fixed_groups, or choose other experts");
    }
  }
  return {};
}

/// Whether capture_obstacle() is empty.
template <class Layer>
bool is_capturable(Layer& layer) {
  bool capturable = true;
  if constexpr (requires { layer.exchange().capturable(); }) capturable = layer.exchange().capturable();
  if constexpr (requires { layer.kernel().capturable(); }) capturable = capturable && layer.kernel().capturable();
  return capturable;
}

/// E_STATE if `stream` is being captured and the layer's forward() cannot be. Before any work, and the other ranks are not told: a group
/// captures on all of its ranks.
template <class Layer>
void expect_capturable([[maybe_unused]] Layer& layer, [[maybe_unused]] Stream<typename Layer::Space> stream) {
  using Space = typename Layer::Space;
  if constexpr (Space::kKind == SpaceKind::cuda && kMayNotCapture<Layer>) {
    if (is_capturable(layer) || !StreamCapture<Space>::is_active(stream)) return;
    throw Error(ErrorCode::state, text("capture: ", capture_obstacle(layer)));
  }
}

}  // namespace moe
