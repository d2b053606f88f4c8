// SPDX-License-Identifier: Apache-2.0
// layer/forward.hpp: one call of a layer: validate → route → prepare → experts → finalize.
#pragma once

#include <cstdint>

#include "moe/core/error.hpp"
#include "moe/layer/capture.hpp"
#include "moe/layer/layer.hpp"
#include "moe/routing/pass_logits.hpp"
#include "moe/routing/route.hpp"
#include "moe/routing/row/row_router.hpp"
#include "moe/routing/zero_experts.hpp"

namespace moe::detail {

template <class C>
template <class L, class Probe>
void Layer<C>::run(Hidden hidden, Rows<L const> logits, Output output, ForwardOptions const& options, Stream<Space> stream, Probe& probe) {
  // A model library instantiates run() of every layer; forward() does not compile for a router that does not select.
  if constexpr (facts::selects<RouterType>()) execute(hidden, logits, output, options, stream, probe);
}

template <class C>
template <class Probe>
void Layer<C>::run_routed(Hidden hidden, routing::GivenIds topk_ids, Rows<float const> topk_weights, Output output,
                          ForwardOptions const& options, Stream<Space> stream, Probe& probe) {
  execute(hidden, routing::GivenRouting{topk_ids, topk_weights}, output, options, stream, probe);
}

/// Routing: the router's logits, or routing::GivenRouting.
template <class C>
template <class Routing, class Probe>
void Layer<C>::execute(Hidden hidden, Routing const& routing, Output output, ForwardOptions const& options, Stream<Space> stream,
                       Probe& probe) {
  expect_capturable(*this, stream);
  try {
    begin(hidden, routing, output, options, stream, probe);
  } catch (...) {  // a caller's own routing function may throw anything
    exchange_.abandon(stream);
    throw;
  }
  HalfBatch<C> batch = half(exchange_, kernel_, hidden, output, 0, rows_, options);

  // What runs in one schedule is one phase, that of the experts: a probe's work would come between.
  constexpr bool kArrives = facts::arrives<Exchange>();
  constexpr bool kCompletes = facts::completes<Exchange>();
  if constexpr (!kArrives) {
    probe.begin(Phase::dispatch);
    batch.dispatch(stream);
    probe.end(Phase::dispatch);
  }

  probe.begin(Phase::experts);
  try {
    if constexpr (kArrives) {
      batch.dispatch_experts(stream);
    } else {
      batch.experts_combined(stream);
    }
  } catch (...) {
    batch.abandon(stream);  // the other ranks wait in finalize()
    throw;
  }
  if constexpr (!kCompletes) {
    probe.end(Phase::experts);
    probe.begin(Phase::combine);
  }
  batch.combine(stream);
  probe.end(kCompletes ? Phase::experts : Phase::combine);
}

/// Validates and routes the batch.
template <class C>
template <class Routing, class Probe>
void Layer<C>::begin(Hidden hidden, Routing const& routing, Output output, ForwardOptions const& options, Stream<Space> stream,
                     Probe& probe) {
  validate(hidden, output);
  validate_routing(routing, hidden.extent(0), options);
  check_routing_apart(routing, bytes_of_rows(output));
  check_options_apart(options, hidden.extent(0), bytes_of_rows(output));
  if (options.num_rows != nullptr && !facts::takes_row_count<Exchange>()) {
    throw Error(ErrorCode::unsupported, text("num_rows: ", Backend::kName, " takes its row count from the host"));
  }
  rows_ = hidden.extent(0);
  probe.begin(Phase::route);
  route(routing, options, stream);
  probe.end(Phase::route);
}

template <class C>
HalfBatch<C> Layer<C>::half(Exchange& exchange, Kernel& kernel, Hidden hidden, Output output, std::int64_t first, std::int64_t rows,
                            ForwardOptions const& options) const {
  auto part = [&]<int Cols = dynamic>(auto const& of) {
    return make_strided_rows<Cols>(row_ptr(of, first), rows, of.extent(1), of.stride(0));
  };
  Rows<float const> const weights = make_rows(static_cast<float const*>(weights_), rows_, num_slots_);
  return HalfBatch<C>(exchange, kernel,
                      {part.template operator()<Config::hidden>(hidden), part(dispatched_ids()), part(weights), options.num_rows,
                       facts::skips_foreign_ids<Kernel>()},
                      part.template operator()<Config::hidden>(output));
}

/// Fills topk_ids() and topk_weights(), and dispatched_ with the ids that leave this rank: physical, and no expert for a zero expert, which
/// needs no rank. On the device without a mapping the exchange leaves zero experts out itself.
template <class C>
template <class L>
void Layer<C>::route(Rows<L const> logits, ForwardOptions const& options, Stream<Space> stream) {
  routing::RouteArgs<L> const args{
      logits,         options.num_valid_rows < 0 ? rows_ : options.num_valid_rows,     options.token_ids,      topk_ids(),
      topk_weights(), Space::kKind == SpaceKind::host ? &counters_ : device_counters_, options.shared_weights, options.sequence_length};
  if constexpr (kMonolithic) {
    routing::pass_logits(args, stream);
    if constexpr (Space::kKind == SpaceKind::host) choose_replicas();
  } else if constexpr (Space::kKind == SpaceKind::host) {
    router_.select(args);
    choose_replicas();
  } else if (fix::include_moe_routing_device_route_cuh_or_link_a_model_library(); dispatched_ == nullptr) {
    router_.select(args, stream);
  } else if constexpr (facts::chooses_by_row<RouterType>()) {  // of other routers dispatched_ is null
    routing::FusedRouting<L> fused{.args = args, .logical_ids = ids_, .logical_stride = num_slots_};
    fused.args.topk_ids = make_rows(dispatched_, rows_, num_slots_);
    if (maps()) {
      fused.mapping = &mapping_;
      fused.recorder = load_;
      fused.zero_expert_weights = zero_weights_;
    }
    routing::route_fused(static_cast<routing::RowRouter<typename RouterType::Config> const&>(router_), fused, stream);
    if (shared_.first >= 0) {
      routing::name_shared(shared_, router_.num_experts(), router_.topk(), make_rows(dispatched_, rows_, num_slots_), topk_ids(), stream);
    }
  }
}

template <class C>
void Layer<C>::route(routing::GivenRouting const& given, ForwardOptions const& options, Stream<Space> stream) {
  routing::CallerRouting batch{.given_ids = given.ids,
                               .given_weights = given.weights,
                               .num_valid_rows = options.num_valid_rows < 0 ? rows_ : options.num_valid_rows,
                               .num_rows = options.num_rows,
                               .topk_ids = topk_ids(),
                               .topk_weights = topk_weights()};
  if constexpr (Space::kKind == SpaceKind::host) {
    routing::take_routing(router_, batch, stream);
    choose_replicas();
  } else {
    batch.counters = device_counters_;
    batch.fault = fault_.get();
    if (maps()) {
      batch.dispatched = dispatched_;
      batch.mapping = &mapping_;
      batch.recorder = load_;
      batch.zero_expert_weights = zero_weights_;
    }
    fix::include_moe_routing_device_route_cuh_or_link_a_model_library();
    routing::take_routing(router_, batch, stream);
  }
}

/// Host space: fills dispatched_ from topk_ids().
template <class C>
void Layer<C>::choose_replicas() {
  for (std::int64_t i = 0; i < rows_ * num_slots_; ++i) {
    dispatched_[i] = routing::is_zero_expert(ids_[i], shape_.num_experts()) ? kNoExpert : ids_[i];
  }
  if (maps())
    routing::map_experts(&mapping_, load_, router_.topk(), rows_, make_strided_rows(dispatched_, rows_, router_.topk(), num_slots_));
  if (shared_.first >= 0) send_shared();
}

/// Host space: the fused shared experts of a row become the copies of a rank that has the row, so that they leave it for no other. Ranks
/// with the same rows take turns.
template <class C>
void Layer<C>::send_shared() {
  int const k = router_.topk(), shared = static_cast<int>(num_slots_) - k;
  for (std::int64_t t = 0; t < rows_; ++t) {
    for (int j = 0; j < shared; ++j) {
      std::int64_t const slot = t * num_slots_ + k + j;
      if (ids_[slot] >= 0) dispatched_[slot] = routing::shared_id(shared_, router_.num_experts(), shared, t, j);
    }
  }
}

/// E_ARG unless `value` is `wanted`.
inline void expect_size(char const* what, std::int64_t value, std::int64_t wanted) {
  if (value != wanted) throw Error(ErrorCode::argument, text(what, ": ", value, ", expected ", wanted));
}

template <class C>
void Layer<C>::validate(Hidden hidden, Output output) const {
  weight_move_.expect_none();
  std::int64_t const m = hidden.extent(0);
  auto check_layer_rows = [](char const* what, auto const& rows) {
    check_rows(what, rows);
    if constexpr (Space::kKind == SpaceKind::cuda) {
      check_alignment(what, rows.data_handle(), rows.extent(0), rows.stride(0) * static_cast<std::int64_t>(sizeof(Act)));
    }
  };
  expect_size("hidden_states: width", hidden.extent(1), shape_.hidden());
  expect_size("output: width", output.extent(1), shape_.hidden());
  expect_size("output: rows", output.extent(0), m);
  check_layer_rows("hidden_states", hidden);
  check_layer_rows("output", output);
  if (m > max_tokens_) {
    throw Error(ErrorCode::capacity, text("hidden_states: ", m, " rows exceed max_tokens_per_rank ", max_tokens_));
  }
  check_apart_or_same(hidden, output);  // last: too many rows of two neighbouring arrays overlap, too
}

template <class C>
template <class L>
void Layer<C>::validate_routing(Rows<L const> logits, std::int64_t rows, ForwardOptions const& options) const {
  expect_size("router_logits: rows", logits.extent(0), rows);
  expect_size("router_logits: width", logits.extent(1), router_.num_logits());
  check_valid_rows(options, rows);
}

template <class C>
void Layer<C>::validate_routing(routing::GivenRouting const& given, std::int64_t rows, ForwardOptions const& options) const {
  if (num_slots_ != router_.topk()) {
    throw Error(ErrorCode::unsupported,
                "fused shared experts: forward_routed() has no columns for them; the router adds them in forward()");
  }
  routing::check_given(router_, given.ids, given.weights, rows);
  check_valid_rows(options, rows);
  auto const refuse = [](char const* what) {
    throw Error(ErrorCode::argument, text(what, ": given to forward_routed(), which does not route; only forward() takes it"));
  };
  if (options.token_ids != nullptr) refuse("token_ids");
  if (options.shared_weights.data_handle() != nullptr) refuse("shared_weights");
}

template <class C>
Rows<std::int32_t const> Layer<C>::dispatched_ids() const {
  return make_rows(static_cast<std::int32_t const*>(dispatched_ != nullptr ? dispatched_ : ids_), rows_, num_slots_);
}

template <class C>
routing::RouteCounters Layer<C>::counters() const {
  routing::RouteCounters counted = counters_;
  if constexpr (Space::kKind == SpaceKind::cuda) Memory<Space>::copy_to_host(&counted, device_counters_, sizeof counted);
  return counted;
}

template <class C>
void Layer<C>::weights_changed(Stream<Space> stream) {
  facts::weights_changed(kernel_, stream);
}

template <class C>
void Layer<C>::wait(Stream<Space> stream) {
  if constexpr (Space::kKind == SpaceKind::cuda && !facts::waits<Exchange, Stream<Space>>()) {
    Memory<Space>::synchronize(stream);  // what the exchange has enqueued ends by itself: kernels that wait for peers have a deadline
    check();
  } else {
    facts::wait(exchange_, stream);
    routing::throw_caller_fault(*fault_.get());
  }
}

template <class C>
void Layer<C>::check() {
  routing::throw_caller_fault(*fault_.get());  // first: an exchange's error may follow from it
  facts::check(exchange_);
}

}  // namespace moe::detail
