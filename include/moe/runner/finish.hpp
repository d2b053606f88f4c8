// SPDX-License-Identifier: Apache-2.0
// runner/finish.hpp: the end of a runner's forward: what is added to the routed output, and the sums over a TP group.
#pragma once

#include <cstdint>

#include "moe/runner/declaration.hpp"

namespace moe {

/// routed [M, H'] → output [M, H]. x: the experts' input. complete_terms: those that are complete on every rank; shared_term: the shared
/// output.
template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::leave([[maybe_unused]] Rows<Act const> x, Rows<Act> routed, Rows<Act> output,
                                   [[maybe_unused]] bool complete_terms, [[maybe_unused]] bool shared_term, Stream<Space> stream) {
  using Kernels = runner::RowKernels<Space>;
  if constexpr (kPlain) {
    Kernels::template copy_columns<Act>(routed, output, stream);
  } else {
    Finish finish{.routed = routed, .output = output, .scale = scaling_.routed};
    if (complete_terms) add_zero_experts(finish, x);
    if constexpr (kHasOutput) {
      if (output_.active()) {
        finish.output = routed;
        if (finish.scale != 1.0F || num_zero_ > 0) Kernels::finish(finish, stream);
        finish = {.routed = output_.apply_normed(routed, stream), .output = output};
      }
    }
    if (shared_term) {
      add_shared(finish);
    } else {
      if constexpr (kHasShared) {
        if (shared_.active()) shared_.output();  // another rank adds it, but a side stream is joined here too, as a capture needs
      }
      finish.scale *= factor_;
    }
    add_end(finish, complete_terms);
    Kernels::finish(finish, stream);
  }
}

/// The same on one rank of a TP group, with the group's sums.
template <class LayerT, class PartsT>
template <class Probe>
void Runner<LayerT, PartsT>::leave_group(Rows<Act const> x, Rows<Act> routed, Rows<Act> output, Stream<Space> stream, Probe& probe) {
  std::int64_t const m = routed.extent(0);
  auto sum = [&](Act* values, std::int64_t n) {
    Timed const timed(probe, Phase::reduction);
    group_.sum(values, n, stream);
  };
  if (plan_.routed_early) sum(routed.data_handle(), m * kernel_hidden_);
  if constexpr (kHasShared) {
    if (plan_.shared_early) sum(shared_.output().data_handle(), m * sizes_.hidden);
  }
  bool const shared_is_term = shared_output_ == runner::SharedOutput::partial && !plan_.shared_early;
  if (!plan_.final) {
    bool const complete_terms = !plan_.result_partial || group_.moe().tp_rank == 0;
    Timed const timed(probe, Phase::finish);
    leave(x, routed, output, complete_terms, complete_terms || shared_is_term, stream);
    return;
  }
  Finish terms{.routed = routed, .output = make_rows(sum_, m, sizes_.hidden), .scale = scaling_.routed};
  if (shared_is_term) add_shared(terms);
  terms.factor = 1.0F;
  finish_rows(terms, stream, probe);
  sum(sum_, m * sizes_.hidden);
  Finish finish{.routed = make_rows(static_cast<Act const*>(sum_), m, sizes_.hidden), .output = output};
  add_zero_experts(finish, x);
  finish.zero_scale = scaling_.routed;
  if (shared_is_term) {
    finish.scale = factor_;
  } else {
    add_shared(finish);
  }
  add_end(finish, true);
  finish_rows(finish, stream, probe);
}

template <class LayerT, class PartsT>
template <class Probe>
void Runner<LayerT, PartsT>::finish_rows(Finish const& rows, Stream<Space> stream, Probe& probe) {
  Timed const timed(probe, Phase::finish);
  runner::RowKernels<Space>::finish(rows, stream);
}

template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::add_zero_experts([[maybe_unused]] Finish& finish, [[maybe_unused]] Rows<Act const> x) {
  if constexpr (kHasZeroExperts) {
    if (num_zero_ == 0) return;
    finish.ids = make_rows(static_cast<std::int32_t const*>(layer_.topk_ids().data_handle()), x.extent(0), layer_.topk_ids().extent(1));
    finish.weights = make_rows(static_cast<float const*>(layer_.topk_weights().data_handle()), x.extent(0), finish.ids.extent(1));
    finish.x =
        make_strided_rows(x.data_handle(), x.extent(0), finish.routed.extent(1), x.stride(0));  // without the padding of the experts' rows
    finish.num_experts = layer_.router().num_experts();
    finish.topk = layer_.router().topk();
    finish.zero_kind = zero_kind_;
  }
}

template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::add_shared([[maybe_unused]] Finish& finish) {
  if constexpr (kHasShared) {
    if (!shared_.active()) return;
    auto const shared = shared_.output();
    finish.shared = make_rows(static_cast<SharedRow const*>(shared.data_handle()), shared.extent(0), shared.extent(1));
    finish.shared_scale = scaling_.shared;
    finish.factor = factor_;
  }
}

template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::add_end(Finish& finish, bool bias) {
  finish.bias = bias ? end_.bias : nullptr;
  finish.normalise = end_.normalise;
  finish.norm = end_.norm;
  finish.eps = end_.eps;
}

}  // namespace moe
