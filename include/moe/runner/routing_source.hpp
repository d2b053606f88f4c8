// SPDX-License-Identifier: Apache-2.0
// runner/routing_source.hpp: where the routing of a runner's forward comes from: logits of its gate, logits of the caller, or ids and
// weights of the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "moe/core/array.hpp"
#include "moe/core/error.hpp"
#include "moe/core/space.hpp"
#include "moe/layer/arguments.hpp"
#include "moe/layer/options.hpp"
#include "moe/routing/caller_routing.hpp"

namespace moe::runner::detail {

// A source has
//   kRoutes                     its rows go through the router
//   check(rows, options)        E_ARG. Before a batch is cut; the layer checks the rest
//   check_apart(output)         E_ARG if the output has a byte of the caller's routing
//   source(hidden, first)       the routing of rows [first, first + rows of hidden) of the batch; first -1: of a row of no batch
// kCut: a batch may be cut into passes.

/// The logits of the runner's gate.
template <class Gate, class Act, class Space>
struct InnerLogits {
  static constexpr bool kRoutes = true;
  Gate& gate;
  Stream<Space> stream;
  void check(std::int64_t, ForwardOptions const&) const {}
  void check_apart(moe::detail::ByteRows const&) const {}
  auto operator()(Rows<Act const> hidden, std::int64_t) const { return gate.logits(hidden, stream); }
};

/// The logits of the caller. zeros: a row of them.
template <class Logit, class Act, bool kCut>
struct OuterLogits {
  static constexpr bool kRoutes = true;
  Rows<Logit> logits;
  std::byte const* zeros;
  std::int64_t width;
  void check(std::int64_t rows, ForwardOptions const&) const {
    moe::detail::check_rows("router_logits", logits);
    if (logits.extent(0) != rows) throw Error(ErrorCode::argument, text("router_logits: rows: ", logits.extent(0), ", expected ", rows));
  }
  void check_apart(moe::detail::ByteRows const& output) const {
    moe::detail::check_routing_apart(static_cast<Rows<Logit const>>(logits), output);
  }
  Rows<Logit const> operator()(Rows<Act const> hidden, std::int64_t first) const {
    if (first < 0) return make_rows(reinterpret_cast<Logit const*>(zeros), 1, width);
    std::int64_t const stride = logits.stride(0);
    return make_strided_rows(static_cast<Logit const*>(logits.data_handle()) + first * stride, kCut ? hidden.extent(0) : logits.extent(0),
                             logits.extent(1), stride);
  }
};

/// The ids and weights of the caller. zeros: a row of either, as wide as the router's logits or wider.
template <class Layer, bool kCut>
struct CallerRows {
  static constexpr bool kRoutes = false;
  using Router = std::remove_cvref_t<decltype(std::declval<Layer&>().router())>;
  routing::GivenRouting given;
  Router const& router;
  std::byte const* zeros;
  /// Host space: of all slots, so that a batch of several passes is refused before the first.
  void check(std::int64_t rows, ForwardOptions const& options) const {
    routing::check_given(router, given.ids, given.weights, rows);
    if constexpr (Layer::Space::kKind == SpaceKind::host) {
      routing::check_given_slots(router, given.ids, given.weights, options.num_valid_rows < 0 ? rows : options.num_valid_rows);
    }
    if (options.token_ids != nullptr) {
      throw Error(ErrorCode::argument, "token_ids: given to forward_routed(), which does not route; only forward() takes it");
    }
  }
  void check_apart(moe::detail::ByteRows const& output) const { moe::detail::check_routing_apart(given, output); }
  routing::GivenRouting operator()(Rows<typename Layer::Act const> hidden, std::int64_t first) const {
    if constexpr (!kCut) return given;
    if (first < 0) {
      return {make_rows(reinterpret_cast<std::int32_t const*>(zeros), 1, router.topk()),
              make_rows(reinterpret_cast<float const*>(zeros), 1, router.topk())};
    }
    std::int64_t const rows = hidden.extent(0), stride = given.weights.stride(0);
    return {given.ids.part(first, rows),
            make_strided_rows(given.weights.data_handle() + first * stride, rows, given.weights.extent(1), stride)};
  }
};

/// The routing of a batch that begins at row `begin` of another, which was checked.
template <class Source>
struct ShiftedSource {
  static constexpr bool kRoutes = Source::kRoutes;
  Source const& source;
  std::int64_t begin;
  void check(std::int64_t, ForwardOptions const&) const {}
  void check_apart(moe::detail::ByteRows const&) const {}
  template <class Hidden>
  auto operator()(Hidden hidden, std::int64_t first) const {
    return source(hidden, first < 0 ? first : first + begin);
  }
};

/// E_ARG if the output has a byte of the caller's routing or of the options' arrays.
template <class Source>
void check_apart(Source const& routing, ForwardOptions const& options, std::int64_t rows, moe::detail::ByteRows const& output) {
  routing.check_apart(output);
  moe::detail::check_options_apart(options, rows, output);
}

}  // namespace moe::runner::detail
