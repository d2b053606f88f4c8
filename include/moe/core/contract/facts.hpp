// SPDX-License-Identifier: Apache-2.0
// core/contract/facts.hpp: optional facts of a policy, each with its default. Layers, exchanges and rules read these functions, never the
// members themselves.
#pragma once

#include <concepts>
#include <cstddef>
#include <type_traits>

namespace moe::facts {

/// Router::kSelects: false if the caller routes (routing::External): the router has no select(), the layer no forward(). Default: it
/// selects.
template <class Router>
constexpr bool selects() {
  if constexpr (requires { Router::kSelects; }) {
    return Router::kSelects;
  } else {
    return true;
  }
}

/// Backend::kRowsStay: rows stay on their rank, so experts may read them unquantised and quantise them while reading. Default: they do not.
template <class Backend>
constexpr bool rows_stay() {
  if constexpr (requires { Backend::kRowsStay; }) {
    return Backend::kRowsStay;
  } else {
    return false;
  }
}

/// Backend::carries_element<Act>(): whether it moves rows of this element type. Default: every type.
template <class Backend, class Act>
constexpr bool carries_element() {
  if constexpr (requires { Backend::template carries_element<Act>(); }) {
    return Backend::template carries_element<Act>();
  } else {
    return true;
  }
}

/// Backend::returns_element<Output>(): whether it brings back expert outputs of this element type. Default: every type.
template <class Backend, class Output>
constexpr bool returns_element() {
  if constexpr (requires { Backend::template returns_element<Output>(); }) {
    return Backend::template returns_element<Output>();
  } else {
    return true;
  }
}

/// Backend::kBatchInvariant: its sums over ranks do not depend on the other rows of a call. Default: they do not, sums go in rank order.
template <class Backend>
constexpr bool backend_is_batch_invariant() {
  if constexpr (requires { Backend::kBatchInvariant; }) {
    return Backend::kBatchInvariant;
  } else {
    return true;
  }
}

/// Experts::kBatchInvariant: a row's bits do not depend on the other rows of a call. Default: they may.
template <class Experts>
constexpr bool experts_are_batch_invariant() {
  if constexpr (requires { Experts::kBatchInvariant; }) {
    return Experts::kBatchInvariant;
  } else {
    return false;
  }
}

/// Experts::shared_memory_bytes<Config, Quant>(): dynamic shared memory of a thread block. Default: none.
template <class Experts, class Config, class Quant>
constexpr int shared_memory_bytes() {
  if constexpr (requires { Experts::template shared_memory_bytes<Config, Quant>(); }) {
    return Experts::template shared_memory_bytes<Config, Quant>();
  } else {
    return 0;
  }
}
/// Experts::kSharedMemoryLimit: the most shared memory that a thread block can have on the architecture. Default: none.
template <class Experts>
constexpr int shared_memory_limit() {
  if constexpr (requires { Experts::kSharedMemoryLimit; }) {
    return Experts::kSharedMemoryLimit;
  } else {
    return 0;
  }
}

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

/// Kernel::kSkipsForeignIds: apply() looks at ids of [0, local experts) only, so one rank's ids need no change. Default: it does not.
template <class Kernel>
constexpr bool skips_foreign_ids() {
  if constexpr (requires { Kernel::kSkipsForeignIds; }) {
    return Kernel::kSkipsForeignIds;
  } else {
    return false;
  }
}

/// Kernel::RowsAsTheyAre: the quantisation in which the kernel reads rows from a backend whose rows stay, because it quantises them itself.
/// Default: the layer's quantisation.
template <class Kernel, class Quant>
struct RowsRead {
  using type = Quant;
};
template <class Kernel, class Quant>
  requires requires { typename Kernel::RowsAsTheyAre; }
struct RowsRead<Kernel, Quant> {
  using type = typename Kernel::RowsAsTheyAre;
};

/// Backend::Params::deduplicate: a token goes to a rank once, and its outputs there are added before they come back. Default: the backend
/// has no such option.
template <class Params>
constexpr bool deduplicates([[maybe_unused]] Params const& params) {
  if constexpr (requires { params.deduplicate; }) {
    return params.deduplicate;
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

/// Kernel::weights_changed(stream): the bytes of the weights were replaced in place; a kernel with its own copy of the weights rebuilds the
/// copy in stream order. Default: the kernel reads the weights where they lie.
template <class Kernel, class StreamT>
void weights_changed([[maybe_unused]] Kernel& kernel, [[maybe_unused]] StreamT stream) {
  if constexpr (requires { kernel.weights_changed(stream); }) kernel.weights_changed(stream);
}

/// Backend::kFacts.asynchronous: sending and waiting are separate calls, or run on a stream of their own. Default: they are not.
template <class Backend>
constexpr bool is_asynchronous() {
  if constexpr (requires { Backend::kFacts.asynchronous; }) {
    return Backend::kFacts.asynchronous;
  } else {
    return false;
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

/// Exchange::window().bytes(): this rank's part of the window that it maps. Default: it has none.
template <class Exchange>
std::size_t window_bytes([[maybe_unused]] Exchange const& exchange) {
  if constexpr (requires { exchange.window().bytes(); }) {
    return static_cast<std::size_t>(exchange.window().bytes());
  } else {
    return 0;
  }
}

/// Exchange::wait(stream): waits for the stream, within the deadline even if a peer has died, and throws any error. Default: nothing; the
/// exchange's work ends without it.
template <class Exchange, class StreamT>
void wait([[maybe_unused]] Exchange& exchange, [[maybe_unused]] StreamT stream) {
  if constexpr (requires { exchange.wait(stream); }) exchange.wait(stream);
}

/// Exchange::check(): throws the error of a round that the stream has finished, if any. Default: nothing; every call throws its own errors.
template <class Exchange>
void check([[maybe_unused]] Exchange& exchange) {
  if constexpr (requires { exchange.check(); }) exchange.check();
}

}  // namespace moe::facts
