// SPDX-License-Identifier: Apache-2.0
// layer/half_batch.hpp: rows on their way through an exchange and the experts, stage by stage: a whole batch in a layer's forward(), one
// half of it where a runner overlaps two.
#pragma once

#include <cstdint>
#include <optional>

#include "moe/core/contract/concepts.hpp"
#include "moe/layer/contract.hpp"

namespace moe::detail {

/// dispatch → experts → combine of some rows, over an exchange that nothing else uses until then. Each of the two transfers is one call, or
/// two between which other work fits (facts::splits_dispatch, facts::splits_combine). C: a legal Composition.
template <class C>
class HalfBatch {
 public:
  using Exchange = typename Parts<C>::Exchange;
  using Kernel = typename Parts<C>::Kernel;
  using Space = typename C::Experts::Space;
  using Act = typename C::Config::Act;
  using Routed = RoutedTokens<Act, C::Config::hidden>;
  using Output = Rows<Act, C::Config::hidden>;
  using Tokens = decltype(std::declval<Exchange&>().prepare(std::declval<Routed const&>(), std::declval<Stream<Space>>()));

  /// All are borrowed. routed: what `exchange` sends; output: [M, H] of the same rows.
  HalfBatch(Exchange& exchange, Kernel& kernel, Routed const& routed, Output output)
      : exchange_(exchange), kernel_(kernel), routed_(routed), output_(output) {}

  void dispatch(Stream<Space> stream) {
    call([&] { tokens_.emplace(exchange_.prepare(routed_, stream)); });
  }
  void experts(Stream<Space> stream) { kernel_.apply(tokens_.value(), facts::expert_output(exchange_, output_), stream); }
  /// experts() with nothing between them and combine(), in one schedule where the composition has that.
  void experts_combined(Stream<Space> stream) {
    if constexpr (facts::completes<Exchange>()) {
      kernel_.apply(tokens_.value(), facts::expert_output(exchange_, output_), exchange_.completions(), stream);
    } else {
      experts(stream);
    }
  }
  /// dispatch() and experts() with nothing between them, nor between them and combine(), in one schedule where the composition has that.
  void dispatch_experts(Stream<Space> stream) {
    if constexpr (facts::arrives<Exchange>()) {
      call([&] { tokens_.emplace(facts::prepare_arriving(exchange_, routed_, stream)); });
      auto const output = facts::expert_output(exchange_, output_);
      if constexpr (facts::completes<Exchange>()) {
        kernel_.apply(tokens_.value(), output, exchange_.arrivals(), exchange_.completions(), stream);
      } else {
        kernel_.apply(tokens_.value(), output, exchange_.arrivals(), stream);
      }
    } else {
      dispatch(stream);
      experts_combined(stream);
    }
  }
  void combine(Stream<Space> stream) {
    call([&] { exchange_.finalize(output_, stream); });
    open_ = false;
  }

  /// dispatch() in two halves. An exchange without them does all in the first.
  void dispatch_send(Stream<Space> stream) {
    if constexpr (facts::splits_dispatch<Exchange, Routed, Stream<Space>>()) {
      call([&] { exchange_.prepare_send(routed_, stream); });
    } else {
      dispatch(stream);
    }
  }
  void dispatch_receive([[maybe_unused]] Stream<Space> stream) {
    if constexpr (facts::splits_dispatch<Exchange, Routed, Stream<Space>>()) {
      call([&] { tokens_.emplace(exchange_.prepare_receive(stream)); });
    }
  }
  /// combine() in two halves. An exchange without them does all in the second.
  void combine_send([[maybe_unused]] Stream<Space> stream) {
    if constexpr (facts::splits_combine<Exchange, Output, Stream<Space>>()) {
      call([&] { exchange_.finalize_send(stream); });
    }
  }
  void combine_receive(Stream<Space> stream) {
    if constexpr (facts::splits_combine<Exchange, Output, Stream<Space>>()) {
      call([&] { exchange_.finalize_receive(output_, stream); });
      open_ = false;
    } else {
      combine(stream);
    }
  }

  /// Collective unless the round has ended: an error of the exchange ends it on all ranks, and so does its combine. Otherwise the other
  /// ranks learn that this one gives up. Never throws.
  void abandon(Stream<Space> stream) {
    if (open_) exchange_.abandon(stream);
    open_ = false;
  }

 private:
  template <class Call>
  void call(Call const& exchange_call) {
    try {
      exchange_call();
    } catch (...) {
      open_ = false;
      throw;
    }
  }

  Exchange& exchange_;
  Kernel& kernel_;
  Routed routed_;
  Output output_;
  std::optional<Tokens> tokens_;
  bool open_ = true;
};

}  // namespace moe::detail
