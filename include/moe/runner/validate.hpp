// SPDX-License-Identifier: Apache-2.0
// runner/validate.hpp: what a runner checks of the arguments of a forward, and whether one can be captured; the layer checks the rest.
#pragma once

#include <cstdint>
#include <string>

#include "moe/core/contract/facts.hpp"
#include "moe/core/error.hpp"
#include "moe/layer/capture.hpp"
#include "moe/runner/declaration.hpp"

namespace moe {

template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::validate(Rows<Act const> hidden, Rows<Act> output) const {
  layer_.weight_move().expect_none();  // before any work of the block
  validate_widths(hidden, output);
  if (hidden.extent(0) > sizes_.max_rows) {
    throw Error(ErrorCode::capacity, text("hidden_states: ", hidden.extent(0), " rows exceed max_tokens_per_rank ", sizes_.max_rows));
  }
  detail::check_apart_or_same(hidden, output);  // last: too many rows of two neighbouring arrays overlap, too
}

template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::validate_widths(Rows<Act const> hidden, Rows<Act> output) const {
  auto expect = [](char const* what, std::int64_t value, std::int64_t wanted) {
    if (value != wanted) throw Error(ErrorCode::argument, text(what, ": ", value, ", expected ", wanted));
  };
  expect("hidden_states: width", hidden.extent(1), sizes_.hidden);
  expect("output: width", output.extent(1), sizes_.hidden);
  expect("output: rows", output.extent(0), hidden.extent(0));
  detail::check_rows("hidden_states", hidden);
  detail::check_rows("output", output);
}

/// What can be said of a batch's routing before it is cut.
template <class LayerT, class PartsT>
template <class Routing>
void Runner<LayerT, PartsT>::check_routing(Routing const& routing, Rows<Act> output, ForwardOptions const& options) const {
  std::int64_t const rows = output.extent(0);
  check_valid_rows(options, rows);
  expect_joint_weights(Routing::kRoutes);
  routing.check(rows, options);
  runner::detail::check_apart(routing, options, rows, detail::bytes_of_rows(output));
}

/// E_UNSUPPORTED where shared experts need weights of a router that is skipped.
template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::expect_joint_weights(bool routes) const {
  if (routes || !shared_.takes_routing_weights()) return;
  throw Error(ErrorCode::unsupported,
              "shared experts: the router gives their weights (Gate::routing_weight), and forward_routed() skips it; only forward() works");
}

template <class LayerT, class PartsT>
std::string Runner<LayerT, PartsT>::capture_obstacle() {
  std::string obstacle;
  if constexpr (requires { layer_.exchange(); }) obstacle = moe::capture_obstacle(layer_);
  if (obstacle.empty() && !facts::capturable(shared_)) {
    obstacle = "the shared experts' kernel reads the rows per expert back. Fix: choose other experts";
  }
  if constexpr (kParallel) {
    if (obstacle.empty()) obstacle = group_.capture_obstacle();
  }
  if constexpr (kChunked) {
    if (obstacle.empty()) obstacle = chunks_.capture_obstacle();
  }
  return obstacle;
}

}  // namespace moe
