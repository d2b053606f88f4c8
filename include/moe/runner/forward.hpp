// SPDX-License-Identifier: Apache-2.0
// runner/forward.hpp: one forward of a runner: gate and shared experts, layer, zero experts and scaling, projection, sum.
#pragma once

#include <cstdint>

#include "moe/core/error.hpp"
#include "moe/runner/runner.hpp"

namespace moe {

template <class LayerT, class PartsT>
template <class Logits, class Probe>
void Runner<LayerT, PartsT>::run(Rows<Act const> hidden, Logits const& logits, Rows<Act> output, ForwardOptions options,
                                 Stream<Space> stream, Probe& probe) {
  std::int64_t const m = hidden.extent(0);
  Rows<Act const> x;
  decltype(logits()) router_logits;
  try {
    validate(hidden, output);
    probe.begin(Phase::route);
    router_logits = logits();
    probe.end(Phase::route);
    x = expert_input(hidden, stream);
    if (!shared_.takes_routing_weights()) run_shared(hidden, stream);
  } catch (...) {
    layer_.abandon(stream);  // the other ranks wait in the layer
    throw;
  }
  bool const direct = routed_ == nullptr;
  Rows<Act> const routed = direct ? output : make_rows(routed_, m, kernel_hidden_);
  options.shared_weights = make_rows(joint_, m, num_joint_);
  constexpr int kHidden = Layer::Config::hidden;
  layer_.forward(make_rows<kHidden>(x.data_handle(), m, kernel_hidden_, x.stride(0)), router_logits,
                 make_rows<kHidden>(routed.data_handle(), m, kernel_hidden_, routed.stride(0)), options, stream, probe);
  if (shared_.takes_routing_weights()) run_shared(hidden, stream);
  if (!direct) leave(x, make_rows(routed.data_handle(), m, sizes_.expert_hidden, kernel_hidden_), output, stream);
}

template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::validate(Rows<Act const> hidden, Rows<Act> output) const {
  auto expect = [](char const* what, std::int64_t value, std::int64_t wanted) {
    if (value != wanted) throw Error(ErrorCode::argument, text(what, ": ", value, ", expected ", wanted));
  };
  expect("hidden_states: width", hidden.extent(1), sizes_.hidden);
  expect("output: width", output.extent(1), sizes_.hidden);
  expect("output: rows", output.extent(0), hidden.extent(0));
  detail::check_rows("hidden_states", hidden);
  detail::check_rows("output", output);
  if (hidden.extent(0) > sizes_.max_rows) {
    throw Error(ErrorCode::capacity, text("hidden_states: ", hidden.extent(0), " rows exceed max_tokens_per_rank ", sizes_.max_rows));
  }
}

/// hidden [M, H] → [M, kernel_hidden]: projected, then padded with zeros.
template <class LayerT, class PartsT>
auto Runner<LayerT, PartsT>::expert_input(Rows<Act const> hidden, Stream<Space> stream) -> Rows<Act const> {
  Rows<Act const> x = hidden;
  if constexpr (kHasInput) {
    if (input_.active()) x = input_.apply(hidden, stream);
  }
  if (padded_ == nullptr) return x;
  Rows<Act> const padded = make_rows(padded_, hidden.extent(0), kernel_hidden_);
  runner::RowKernels<Space>::copy_columns(x, padded, stream);
  return padded;
}

template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::run_shared([[maybe_unused]] Rows<Act const> hidden, [[maybe_unused]] Stream<Space> stream) {
  if constexpr (kHasShared) {
    if (shared_.active()) shared_.run(hidden, make_rows(static_cast<float const*>(joint_), hidden.extent(0), num_joint_), stream);
  }
}

/// routed [M, H'] → output [M, H]. x: the experts' input.
template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::leave([[maybe_unused]] Rows<Act const> x, Rows<Act> routed, Rows<Act> output, Stream<Space> stream) {
  using Kernels = runner::RowKernels<Space>;
  if constexpr (kPlain) {
    Kernels::template copy_columns<Act>(routed, output, stream);
  } else {
    Finish finish{.routed = routed, .output = output};
    add_routed_terms(finish, x);
    if constexpr (kHasOutput) {
      if (output_.active()) {
        finish.output = routed;
        if (finish.scale != 1.0F || num_zero_ > 0) Kernels::finish(finish, stream);
        finish = {.routed = output_.apply_normed(routed, stream), .output = output};
      }
    }
    add_block_terms(finish);
    Kernels::finish(finish, stream);
  }
}

template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::add_routed_terms(Finish& finish, Rows<Act const> x) {
  finish.scale = scaling_.routed;
  if constexpr (kHasZeroExperts) {
    if (num_zero_ > 0) {
      finish.ids = make_rows(static_cast<std::int32_t const*>(layer_.topk_ids().data_handle()), x.extent(0), layer_.topk_ids().extent(1));
      finish.weights = make_rows(static_cast<float const*>(layer_.topk_weights().data_handle()), x.extent(0), finish.ids.extent(1));
      finish.x = x;
      finish.num_experts = layer_.router().num_experts();
      finish.topk = layer_.router().topk();
      finish.zero_kind = zero_kind_;
    }
  }
}

template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::add_block_terms(Finish& finish) {
  if constexpr (kHasShared) {
    if (shared_.active()) {
      auto const shared = shared_.output();
      finish.shared = make_rows(static_cast<SharedRow const*>(shared.data_handle()), shared.extent(0), shared.extent(1));
      finish.shared_scale = scaling_.shared;
      finish.factor = factor_;
    }
  }
  finish.bias = end_.bias;
  finish.normalise = end_.normalise;
  finish.norm = end_.norm;
  finish.eps = end_.eps;
}

}  // namespace moe
