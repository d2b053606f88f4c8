// SPDX-License-Identifier: Apache-2.0
// core/contract/exchange.hpp: optional members of an exchange, each with its default. Required ones are in core/contract/backend.hpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moe::facts {

/// Exchange::kTakesRowCount: prepare() takes RoutedTokens::num_rows, a count in device memory. Default: it does not; a call that gives a
/// count gets E_UNSUPPORTED.
template <class Exchange>
constexpr bool takes_row_count() {
  if constexpr (requires { Exchange::kTakesRowCount; }) {
    return Exchange::kTakesRowCount;
  } else {
    return false;
  }
}

/// Exchange::expert_output(output): where the experts write; it may be the layer's output itself. Default: expert_output().
template <class Exchange, class Output>
auto expert_output(Exchange& exchange, [[maybe_unused]] Output output) {
  if constexpr (requires { exchange.expert_output(output); }) {
    return exchange.expert_output(output);
  } else {
    return exchange.expert_output();
  }
}

/// Exchange::prepare_send(rows, stream) and prepare_receive(stream): prepare() in two calls, of which the first waits for no rows, so that
/// other work fits between them. Default: prepare() is one call.
template <class Exchange, class Routed, class StreamT>
constexpr bool splits_dispatch() {
  return requires(Exchange& x, Routed const& routed, StreamT stream) {
    x.prepare_send(routed, stream);
    x.prepare_receive(stream);
  };
}
/// Exchange::finalize_send(stream) and finalize_receive(output, stream): the same of finalize(). abandon() ends a round between any two
/// calls.
template <class Exchange, class Output, class StreamT>
constexpr bool splits_combine() {
  return requires(Exchange& x, Output output, StreamT stream) {
    x.finalize_send(stream);
    x.finalize_receive(output, stream);
  };
}

/// Exchange::kArrives: Exchange::arrivals() has device-side counts of the rows that the last prepare() brings, for experts that run beside
/// its transfer. Default: rows have come before the experts start.
template <class Exchange>
constexpr bool arrives() {
  if constexpr (requires { Exchange::kArrives; }) {
    return Exchange::kArrives;
  } else {
    return false;
  }
}

/// Exchange::prepare_arriving(rows, stream): with kArrives, prepare() that may end before its rows have come; all else is complete when it
/// ends. Default: prepare().
template <class Exchange, class Routed, class StreamT>
auto prepare_arriving(Exchange& exchange, Routed const& routed, StreamT stream) {
  if constexpr (requires { exchange.prepare_arriving(routed, stream); }) {
    return exchange.prepare_arriving(routed, stream);
  } else {
    return exchange.prepare(routed, stream);
  }
}

/// Exchange::kCompletes: Exchange::completions() has words in which experts say which columns of their output are complete, so that the
/// finalize() of the last prepare() starts beside them. After that call the experts must tell every block, once, before they end. Default:
/// finalize() starts when the experts are done.
template <class Exchange>
constexpr bool completes() {
  if constexpr (requires { Exchange::kCompletes; }) {
    return Exchange::kCompletes;
  } else {
    return false;
  }
}

/// Exchange::window().bytes(): this rank's part of the window that it maps. Default: it has none.
template <class Exchange>
std::size_t window_bytes([[maybe_unused]] Exchange const& exchange) {
  if constexpr (requires { exchange.window().bytes(); }) {
    return static_cast<std::size_t>(exchange.window().bytes());
  } else {
    return 0;
  }
}

/// Exchange::waited_ns(), or that of its window(): [ranks] nanoseconds that this rank has waited for each rank. A communicator may have it
/// too. Default: none are counted.
template <class Part>
constexpr bool counts_waits() {
  return requires(Part& part) { part.waited_ns(); } || requires(Part& part) { part.window().waited_ns(); };
}
template <class Part>
std::vector<std::uint64_t> waited_ns([[maybe_unused]] Part& part) {
  if constexpr (requires { part.waited_ns(); }) {
    return part.waited_ns();
  } else if constexpr (requires { part.window().waited_ns(); }) {
    return part.window().waited_ns();
  } else {
    return {};
  }
}

/// Exchange::wait(stream): waits for the stream, within the deadline even if a peer has died, and throws any error. Default: nothing; the
/// exchange's work ends without it, so that a layer can synchronise the stream.
template <class Exchange, class StreamT>
constexpr bool waits() {
  return requires(Exchange& exchange, StreamT stream) { exchange.wait(stream); };
}
template <class Exchange, class StreamT>
void wait([[maybe_unused]] Exchange& exchange, [[maybe_unused]] StreamT stream) {
  if constexpr (waits<Exchange, StreamT>()) exchange.wait(stream);
}

/// Exchange::check(): throws the error of a round that the stream has finished, if any. Default: nothing; every call throws its own errors.
template <class Exchange>
void check([[maybe_unused]] Exchange& exchange) {
  if constexpr (requires { exchange.check(); }) exchange.check();
}

/// Exchange::over(): whether a deadline or an error has ended its group. Default: false; its kernels have a deadline of their own, and no
/// round leaves work behind that waits.
template <class Exchange>
bool is_over([[maybe_unused]] Exchange& exchange) {
  if constexpr (requires { exchange.over(); }) {
    return exchange.over();
  } else {
    return false;
  }
}
/// Exchange::end(): ends its group, because another group of this rank has failed and what is enqueued here may wait for the same rank for
/// ever. Calls nothing of CUDA and does not throw. Default: nothing; what it has enqueued ends by itself.
template <class Exchange>
void end([[maybe_unused]] Exchange& exchange) {
  if constexpr (requires { exchange.end(); }) exchange.end();
}

}  // namespace moe::facts
