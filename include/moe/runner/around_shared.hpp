// SPDX-License-Identifier: Apache-2.0
// runner/around_shared.hpp: the routed experts of a runner whose shared experts run while the exchange's rows travel.
#pragma once

#include "moe/core/contract/facts.hpp"
#include "moe/runner/declaration.hpp"

namespace moe {

/// The routed experts, and the shared ones while an exchange's rows travel: between the halves of its combine, or of its dispatch if only
/// that has halves.
template <class LayerT, class PartsT>
template <class X, class Y, class B, class Probe>
void Runner<LayerT, PartsT>::layer_around_shared(X x, Y routed, B& batch, Probe& probe) {
  constexpr bool kInCombine = facts::splits_combine<typename Layer::Exchange, Y, Stream<Space>>();
  Stream<Space> const stream = batch.stream;
  auto phase = [&](Phase which, auto const& call) {
    Timed const timed(probe, which);
    call();
  };
  try {
    layer_.begin(x, batch.routing, routed, batch.options, stream, probe);
  } catch (...) {
    layer_.abandon(stream);
    throw;
  }
  auto whole = layer_.half(layer_.exchange(), layer_.kernel(), x, routed, 0, x.extent(0), batch.options);
  try {
    phase(Phase::dispatch, [&] { whole.dispatch_send(stream); });
    if (!kInCombine) run_shared(batch.hidden, stream, probe);
    phase(Phase::dispatch, [&] { whole.dispatch_receive(stream); });
    phase(Phase::experts, [&] { whole.experts(stream); });
    phase(Phase::combine, [&] { whole.combine_send(stream); });
    if (kInCombine) run_shared(batch.hidden, stream, probe);
    phase(Phase::combine, [&] { whole.combine_receive(stream); });
  } catch (...) {
    whole.abandon(stream);  // the other ranks wait in the exchange
    throw;
  }
}

}  // namespace moe
