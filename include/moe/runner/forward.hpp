// SPDX-License-Identifier: Apache-2.0
// runner/forward.hpp: one forward of a runner, in stages: gate, layer (whole or in halves) and shared experts. What it checks first is
// in runner/validate.hpp, its end in runner/finish.hpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <type_traits>

#include "moe/core/contract/facts.hpp"
#include "moe/core/error.hpp"
#include "moe/layer/capture.hpp"
#include "moe/routing/row/expert_capacity.hpp"
#include "moe/runner/declaration.hpp"

namespace moe {

template <class LayerT, class PartsT>
template <class Routing, class Probe>
void Runner<LayerT, PartsT>::run(Rows<Act const> hidden, Routing const& routing, Rows<Act> output, ForwardOptions const& options,
                                 Stream<Space> stream, Probe& probe) {
  expect_capturable(layer_, stream);
  if constexpr (kParallel) {
    try {
      run_rank(hidden, routing, output, options, stream, probe);
    } catch (TransportError const&) {
      if (group_.failed()) end_layer();
      throw;
    }
  } else {
    run_alone(hidden, routing, output, options, stream, probe);
  }
}

template <class LayerT, class PartsT>
template <class Routing, class Probe>
void Runner<LayerT, PartsT>::run_alone(Rows<Act const> hidden, Routing const& routing, Rows<Act> output, ForwardOptions const& options,
                                       Stream<Space> stream, Probe& probe) {
  if constexpr (kChunked) {
    run_chunks(hidden, routing, output, options, stream, probe);
  } else {
    pass(hidden, routing, 0, output, options, stream, probe);
  }
}

template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::abandon(Stream<Space> stream) {
  if constexpr (kParallel) {
    try {
      group_.agree(-1 - static_cast<std::int64_t>(ErrorCode::peer), stream);
    } catch (Error const&) {  // the communicator reports its failure to the next call as well
      if (group_.failed()) {
        end_layer();
        return;
      }
    }
  }
  refuse(ErrorCode::peer, 0, stream);
}

/// Tells the layer's group that this rank makes no pass. rows: those of its batch, 0 if it does not know. Never throws.
template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::refuse([[maybe_unused]] ErrorCode code, std::int64_t rows, Stream<Space> stream) {
  if constexpr (kChunked) {
    chunks_.refuse(code);
    for (std::int64_t pass = 0; !chunks_.agrees() && pass < chunks_.fixed_passes(); ++pass) {
      refuse_pass(std::clamp<std::int64_t>(rows - pass * chunks_.rows(), 0, chunks_.rows()), stream);
    }
  } else {
    refuse_pass(rows, stream);
  }
}

/// The same for one pass. rows: those that this rank would have had, 0 if it does not know. Never throws.
template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::refuse_pass([[maybe_unused]] std::int64_t rows, Stream<Space> stream) {
  bool halves = false;
  if constexpr (kDualBatch) halves = halved_.refuses(rows);
  abandon_layer(halves, stream);
}

/// call(), then an agreement of the TP group that all its ranks made it: a rank that did not would leave the others in their next sum. A
/// layer whose group is over ends the TP group instead: its ranks have met the same deadline, and an agreement would wait for another.
template <class LayerT, class PartsT>
template <class Call>
void Runner<LayerT, PartsT>::together(std::int64_t rows, Stream<Space> stream, Call const& call) {
  auto tell = [&](ErrorCode code) {
    try {
      group_.agree(-1 - static_cast<std::int64_t>(code), stream);
    } catch (Error const&) {  // as in abandon()
    }
  };
  try {
    call();
  } catch (Error const& e) {
    if (layer_is_over()) {
      group_.end();
    } else {
      tell(e.code());
    }
    throw;
  } catch (...) {
    tell(ErrorCode::internal);
    throw;
  }
  group_.agree(rows, stream);
}

/// One rank of a grid: the TP group agrees that it can begin; under sequence parallelism each of its ranks takes its rows.
template <class LayerT, class PartsT>
template <class Routing, class Probe>
void Runner<LayerT, PartsT>::run_rank(Rows<Act const> hidden, Routing const& routing, Rows<Act> output, ForwardOptions const& options,
                                      Stream<Space> stream, Probe& probe) {
  std::int64_t const m = hidden.extent(0);
  bool const split = group_.moe().use_sp_moe();
  group_.check(stream);
  try {
    together(m, stream, [&] {
      validate_widths(hidden, output);
      check_routing(routing, output, options);
      std::int64_t const most = sizes_.max_rows * group_.moe().sp_size;
      if (m > (kChunked ? kMostSize : most)) {
        throw Error(ErrorCode::capacity, text("hidden_states: ", m, " rows exceed max_tokens_per_rank ", most));
      }
      detail::check_apart_or_same(hidden, output);
      if (split && m > 1 && output.stride(0) != sizes_.hidden) {
        throw Error(ErrorCode::argument, text("output: row stride ", output.stride(0), ", sequence parallelism needs ", sizes_.hidden));
      }
      if (split && Routing::kRoutes) {
        moe::routing::check_cut(layer_.router(), m, runner::parallel::slice_of(m, group_.moe()).begin, options.sequence_length);
      }
    });
  } catch (TransportError const& e) {
    if (!group_.failed()) refuse(e.code(), m, stream);
    throw;
  } catch (Error const& e) {
    refuse(e.code(), m, stream);
    throw;
  }
  if (!split) {
    run_alone(hidden, routing, output, options, stream, probe);
    return;
  }
  runner::parallel::Slice const mine = runner::parallel::slice_of(m, group_.moe());
  ForwardOptions part = options;
  part.num_valid_rows = std::clamp<std::int64_t>((options.num_valid_rows < 0 ? m : options.num_valid_rows) - mine.begin, 0, mine.rows);
  if (part.token_ids != nullptr) part.token_ids += mine.begin;
  together(m, stream, [&] {
    run_alone(make_strided_rows(row_ptr(hidden, mine.begin), mine.rows, sizes_.hidden, hidden.stride(0)),
              runner::detail::ShiftedSource<Routing>{routing, mine.begin},
              make_strided_rows(row_ptr(output, mine.begin), mine.rows, sizes_.hidden, output.stride(0)), part, stream, probe);
  });
  Timed const timed(probe, Phase::reduction);
  group_.gather_slices(output.data_handle(), m, sizes_.hidden, stream);
}

/// As many passes as the largest rank needs, on every rank. A rank without rows left brings none, or one row without experts. After an
/// error a rank gives up its other passes one by one: not all ranks see an error in the same pass, on the device none but the one that has
/// it.
template <class LayerT, class PartsT>
template <class Routing, class Probe>
void Runner<LayerT, PartsT>::run_chunks(Rows<Act const> hidden, Routing const& routing, Rows<Act> output, ForwardOptions const& options,
                                        Stream<Space> stream, Probe& probe) {
  std::int64_t const m = hidden.extent(0);
  std::int64_t const h = sizes_.hidden;
  auto const check = [&] {
    validate_widths(hidden, output);
    detail::check_apart_or_same(hidden, output);
    check_routing(routing, output, options);
    if (options.num_rows != nullptr) throw Error(ErrorCode::unsupported, "num_rows: chunks take their row count from the host");
    if (Routing::kRoutes) moe::routing::check_cut(layer_.router(), m, chunks_.rows(), options.sequence_length);
  };
  try {
    chunks_.agree(m, check, stream);
  } catch (...) {
    if (!chunks_.agrees()) refuse(ErrorCode::peer, m, stream);  // the other ranks make their passes
    throw;
  }
  std::int64_t const valid = options.num_valid_rows < 0 ? m : options.num_valid_rows;
  auto const run_chunk = [&](auto const& chunk) {
    ForwardOptions part = options;
    if (chunk.dummy) {
      Act const* const row = m > 0 ? row_ptr(hidden, m - 1) : reinterpret_cast<Act const*>(zeros_);
      part.num_valid_rows = 0;
      if (part.token_ids != nullptr && m > 0) part.token_ids += m - 1;
      pass(make_rows(row, 1, h), routing, m - 1, make_rows(dummy_, 1, h), part, stream, probe);
      return;
    }
    part.num_valid_rows = std::clamp<std::int64_t>(valid - chunk.begin, 0, chunk.rows);
    if (part.token_ids != nullptr) part.token_ids += chunk.begin;
    pass(make_strided_rows(row_ptr(hidden, chunk.begin), chunk.rows, h, hidden.stride(0)), routing, chunk.begin,
         make_strided_rows(row_ptr(output, chunk.begin), chunk.rows, h, output.stride(0)), part, stream, probe);
  };
  std::exception_ptr failure;
  chunks_.each([&](auto const& chunk) {
    if (failure != nullptr) {
      refuse_pass(chunk.dummy ? 1 : chunk.rows, stream);
      return;
    }
    try {
      run_chunk(chunk);
    } catch (...) {
      failure = std::current_exception();
    }
  });
  if (failure != nullptr) std::rethrow_exception(failure);
}

/// One pass through the layer. first: the first row's position in the batch, or -1.
template <class LayerT, class PartsT>
template <class Routing, class Probe>
void Runner<LayerT, PartsT>::pass(Rows<Act const> hidden, Routing const& routing, std::int64_t first, Rows<Act> output,
                                  ForwardOptions options, Stream<Space> stream, Probe& probe) {
  Batch<decltype(routing(hidden, first))> batch{hidden, output, options, stream};
  if constexpr (kDualBatch) batch.halves = halved_.splits(hidden.extent(0));
  auto forward = [&] {
    try {
      gate_stage(batch, routing, first, probe);
    } catch (...) {
      abandon_layer(batch.halves, stream);  // the other ranks wait in the layer
      throw;
    }
    layer_stage(batch, probe);
  };
  auto narrow = [&] { return make_strided_rows(batch.routed.data_handle(), hidden.extent(0), sizes_.expert_hidden, kernel_hidden_); };
  if constexpr (kParallel) {
    if (plan_.routed_early || plan_.shared_early || plan_.final) {
      together(hidden.extent(0), stream, forward);
    } else {
      forward();
    }
    leave_group(batch.x, narrow(), output, stream, probe);
  } else {
    forward();
    if (routed_ == nullptr) return;
    Timed const timed(probe, Phase::finish);
    leave(batch.x, narrow(), output, true, true, stream);
  }
}

/// Logits or the caller's routing, the experts' input, and the shared experts if they run before the routed ones.
template <class LayerT, class PartsT>
template <class B, class Routing, class Probe>
void Runner<LayerT, PartsT>::gate_stage(B& batch, Routing const& routing, std::int64_t first, Probe& probe) {
  std::int64_t const m = batch.hidden.extent(0);
  validate(batch.hidden, batch.output);
  expect_joint_weights(Routing::kRoutes);
  runner::detail::check_apart(routing, batch.options, m, detail::bytes_of_rows(batch.output));
  probe.begin(Phase::route);
  batch.routing = routing(batch.hidden, first);
  batch.x = expert_input(batch.hidden, batch.stream);
  probe.end(Phase::route);
  batch.routed = routed_ == nullptr ? batch.output : make_rows(routed_, m, kernel_hidden_);
  if (Routing::kRoutes) batch.options.shared_weights = make_rows(joint_, m, num_joint_);
  if (!batch.halves && !shared_waits(m) && !shared_.takes_routing_weights()) run_shared(batch.hidden, batch.stream, probe);
}

/// The routed experts, whole or in halves, and the shared experts unless they have run. Its errors reach all ranks.
template <class LayerT, class PartsT>
template <class B, class Probe>
void Runner<LayerT, PartsT>::layer_stage(B& batch, Probe& probe) {
  constexpr int kHidden = Layer::Config::hidden;
  std::int64_t const m = batch.hidden.extent(0);
  Rows<Act const, kHidden> const x = make_strided_rows<kHidden>(batch.x.data_handle(), m, kernel_hidden_, batch.x.stride(0));
  Rows<Act, kHidden> const routed = make_strided_rows<kHidden>(batch.routed.data_handle(), m, kernel_hidden_, batch.routed.stride(0));
  if constexpr (kDualBatch) {
    if (batch.halves) {
      try {
        layer_.begin(x, batch.routing, routed, batch.options, batch.stream, probe);
      } catch (...) {
        abandon_layer(true, batch.stream);
        throw;
      }
      halved_.run(layer_, x, routed, batch.options, batch.stream, probe,
                  [&](Stream<Space> stream) { run_shared(batch.hidden, stream, probe); });
      return;
    }
  }
  if constexpr (kSharedFitsBetween) {
    if (shared_waits(m)) {
      layer_around_shared(x, routed, batch, probe);
      return;
    }
  }
  if constexpr (std::is_same_v<decltype(batch.routing), routing::GivenRouting>) {
    layer_.forward_routed(x, batch.routing.ids, batch.routing.weights, routed, batch.options, batch.stream, probe);
  } else {
    layer_.forward(x, batch.routing, routed, batch.options, batch.stream, probe);
  }
  if (shared_.takes_routing_weights()) run_shared(batch.hidden, batch.stream, probe);
}

/// Tells the layer's group that this rank makes no pass, whose form all ranks know. Never throws.
template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::abandon_layer([[maybe_unused]] bool halves, Stream<Space> stream) {
  if constexpr (kDualBatch) {
    if (halves) {
      halved_.abandon(layer_, stream);
      return;
    }
  }
  layer_.abandon(stream);
}

/// Whether a deadline or an error has ended the layer's group. False for a layer without exchange(), whose forward returns when the device
/// has finished (runner::OnHost).
template <class LayerT, class PartsT>
bool Runner<LayerT, PartsT>::layer_is_over() {
  if constexpr (requires { layer_.exchange(); }) return facts::is_over(layer_.exchange());
  return false;
}

template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::check() {
  if constexpr (kDualBatch) {
    halved_.check(layer_);
  } else {
    layer_.check();
  }
}
template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::wait(Stream<Space> stream) {
  if constexpr (kParallel && Space::kKind == SpaceKind::cuda) {
    // Without a wait of the exchange the layer's waits for the whole stream: only once the group's sums have ended.
    constexpr bool kLayerLast = !facts::waits<typename Layer::Exchange, Stream<Space>>();
    auto const layer = [&] {
      if constexpr (!kLayerLast) wait_layer(stream);
    };
    group_.wait(stream, layer, [&] { end_layer(); });
    if constexpr (kLayerLast) wait_layer(stream);
  } else if constexpr (kParallel) {
    group_.wait(stream, [&] { wait_layer(stream); }, [&] { end_layer(); });
  } else {
    wait_layer(stream);
  }
}
template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::wait_layer(Stream<Space> stream) {
  if constexpr (kDualBatch) {
    halved_.wait(layer_, stream);
  } else {
    layer_.wait(stream);
  }
}

/// The TP group has failed, and what the layer has enqueued may wait for the same rank for ever: its group ends too, so that the caller can
/// free memory, which waits for the device.
template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::end_layer() noexcept {
  if constexpr (requires { layer_.exchange(); }) facts::end(layer_.exchange());
}

template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::weights_changed(Stream<Space> stream) {
  layer_.weights_changed(stream);
  if constexpr (kDualBatch) halved_.weights_changed(stream);
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
template <class Probe>
void Runner<LayerT, PartsT>::run_shared([[maybe_unused]] Rows<Act const> hidden, [[maybe_unused]] Stream<Space> stream,
                                        [[maybe_unused]] Probe& probe) {
  if constexpr (kHasShared) {
    if (!shared_.active()) return;
    Timed const timed(probe, Phase::shared);
    shared_.run(hidden, make_rows(static_cast<float const*>(joint_), hidden.extent(0), num_joint_), stream);
    std::int64_t const rows = shared_.rows();  // output() would make the routed experts wait for a side stream
    if (rows != hidden.extent(0)) {
      throw Error(ErrorCode::internal, text("shared experts: ", rows, " rows of output for ", hidden.extent(0), " rows"));
    }
  }
}

}  // namespace moe
