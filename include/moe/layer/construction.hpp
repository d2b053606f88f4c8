// SPDX-License-Identifier: Apache-2.0
// layer/construction.hpp: the construction of a layer: its checks, the agreement of its ranks, its memory.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <utility>

#include "moe/activation/activation.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/error.hpp"
#include "moe/layer/layer.hpp"
#include "moe/parallel/construction.hpp"
#include "moe/parallel/layer_fingerprint.hpp"
#include "moe/routing/row/row_router.hpp"

namespace moe::detail {

/// E_CONFIG on constants that the activation's formula cannot take.
template <class Activation>
void check_constants(Activation const& activation) {
  if constexpr (facts::has_constants<Activation>() && facts::chooses_kind<Activation>()) {
    activation::validate(activation.kind, activation.constants);
  } else if constexpr (facts::has_constants<Activation>() && facts::fixes_kind<Activation>()) {
    activation::validate(Activation::kKind, activation.constants);
  }
}

template <class C>
Layer<C>::Layer(Comm& comm, Weights const& weights, Params const& p)
    : shape_(build(comm, [&] { return make_shape(p.shape); })),
      router_(build(comm, [&] { return make_router(p.router); })),
      num_slots_(kMonolithic ? router_.num_logits() : router_.num_slots()),
      mapping_(p.mapping),
      load_(p.load),
      max_tokens_(agreed_max_tokens(comm, weights, p)),
      exchange_(comm, exchange_shape(), max_tokens_, all_experts(p.placement), row_quantization(p.quantization), p.backend, arena_),
      kernel_(build(comm, [&] { return Kernel(shape_, weights, exchange_.max_rows(), p.quantization, p.activation, p.experts, arena_); })) {
  if constexpr (kMonolithic) kernel_.route_with(router_);
  build(comm, [&] {
    take_shared(comm, p);
    take_memory();
  });
  agree_on_construction(comm);
  if (p.log) {
    p.log(text("moe: ", RouterType::kName, ", ", Quant::kName, ", ", Backend::kName, ", ", Experts::kName, " on rank ", comm.rank(), " of ",
               comm.size(), ": ", memory().arena, " bytes in the arena, ", memory().window, " in the window"));
  }
}

template <class C>
Layer<C>::~Layer() = default;

/// If the router weights the input (kWeightOnInput), the layer does too, even if the caller's shape does not ask for it.
template <class C>
auto Layer<C>::make_shape(LayerShape shape) -> Shape<Config> {
  shape.weight_on_input = shape.weight_on_input || RouterType::kWeightOnInput;
  try {
    return Shape<Config>(shape);
  } catch (Error const& e) {
    if (shape.hidden == 0 && shape.intermediate == 0 && shape.num_experts == 0 && shape.topk == 0) {
      throw Error(e.code(),
                  text(".shape is missing in the layer's parameters, and the configuration leaves dimensions dynamic: ", e.message()));
    }
    throw;
  }
}

template <class C>
auto Layer<C>::make_router(typename RouterType::Params const& params) -> RouterType {
  if constexpr (kHasSelectionBias<Config> && facts::takes_correction_bias<typename RouterType::Params>()) {
    if (params.correction_bias == nullptr) {
      throw Error(ErrorCode::argument, text(".router.correction_bias is null, expected ", params.num_experts,
                                            " values: the model's router has a selection bias (e_score_correction_bias)"));
    }
  }
  try {
    return RouterType(params);
  } catch (Error const& e) {
    if (facts::lacks_num_experts(params)) {
      throw Error(e.code(), text(".router is missing in the layer's parameters, or leaves num_experts at 0: ", e.message()));
    }
    throw;
  }
}

template <class C>
auto Layer<C>::row_quantization([[maybe_unused]] Quant const& quant) -> RowQuant {
  if constexpr (std::is_same_v<RowQuant, Quant>) {
    return quant;
  } else {
    return {};
  }
}

/// Collective. Returns T_max, once every rank has accepted its arguments.
template <class C>
std::int64_t Layer<C>::agreed_max_tokens(Comm& comm, Weights const& weights, Params const& p) const {
  build(comm, [&] {
    check_router(p.placement);
    if (p.max_tokens_per_rank < 0) {
      throw Error(ErrorCode::config,
                  text(".max_tokens_per_rank is missing in the layer's parameters, or below 0: ", p.max_tokens_per_rank));
    }
    if (p.max_tokens_per_rank > kMostSize) {
      throw Error(ErrorCode::capacity, text("max_tokens_per_rank: ", p.max_tokens_per_rank, " exceeds ", kMostSize));
    }
    check_constants(p.activation);
    check_mapping(p.placement, p.backend);
    check_local_experts(weights, all_experts(p.placement), comm.rank(), comm.size());
    check_expert_norm(weights.norm, shape_.hidden());
  });
  Fingerprint choices = layer_fingerprint<Config, Backend>(shape_, router_, p.quantization, p.activation, p.placement);
  if constexpr (kExpertNorm<Config> != ExpertNorm::none) {
    choices.add("norm of the experts' outputs: eps", weights.norm.given() ? digits(weights.norm.eps) : "none");
  }
  agree_on_fingerprint(comm, choices);
  return p.max_tokens_per_rank;
}

template <class C>
void Layer<C>::take_memory() {
  ids_ = arena_.template take<std::int32_t>(max_tokens_ * num_slots_);
  weights_ = arena_.template take<float>(max_tokens_ * num_slots_);
  if constexpr (Space::kKind == SpaceKind::cuda && facts::selects<RouterType>() && !facts::chooses_by_row<RouterType>()) {
    if (maps() || shared_.first >= 0) {
      throw Error(
          ErrorCode::unsupported,
          text(maps() ? "mapping" : "fused shared experts", ": the launch that routes maps the ids in the CUDA space, and the router ",
               RouterType::kName, " has a launch of its own. Fix: derive it from routing::RowRouter<Config>"));
    }
  }
  if (Space::kKind == SpaceKind::host || maps() || shared_.first >= 0)
    dispatched_ = arena_.template take<std::int32_t>(max_tokens_ * num_slots_);
  if (Space::kKind == SpaceKind::cuda && maps()) zero_weights_ = arena_.template take<float>(max_tokens_);
  if constexpr (Space::kKind == SpaceKind::cuda) device_counters_ = take_zeroed_counters();
  arena_.seal();
}

template <class C>
routing::RouteCounters* Layer<C>::take_zeroed_counters() {
  auto* const counters = arena_.template take<routing::RouteCounters>(1);
  Memory<Space>::fill(counters, 0, sizeof *counters);
  return counters;
}

template <class C>
void Layer<C>::check_router(ExpertPlacement const& placement) const {
  int const fused = router_.num_slots() - router_.topk();
  std::string const and_fused = fused == 0 ? std::string() : text(" and ", fused, " fused shared experts");
  if (router_.num_slots() != shape_.topk()) {
    throw Error(ErrorCode::config, text("top_k: the router chooses ", router_.topk(), and_fused, ", the layer has ", shape_.topk()));
  }
  if (router_.num_experts() + fused != shape_.num_experts()) {
    throw Error(ErrorCode::config,
                text("num_experts: the router has ", router_.num_experts(), and_fused, ", the layer ", shape_.num_experts()));
  }
  if constexpr (kMonolithic) check_monolithic();
  if (fused > 0 && maps() && placement.ep_size() == 1) {
    throw Error(ErrorCode::unsupported,
                "fused shared experts: every rank computes its own, and a mapping moves experts; run shared experts beside the layer");
  }
}

/// E_CONFIG for what only a layer that routes can do.
template <class C>
void Layer<C>::check_monolithic() const {
  auto const refuse = [](char const* what) {
    throw Error(ErrorCode::config, text("monolithic kernel without ", what, ". Choose experts that take routed rows"));
  };
  if (maps() || load_.load_counter != nullptr) refuse("EPLB: it takes no mapping of experts and counts no load");
  if (router_.num_slots() != router_.topk()) refuse("fused shared experts: it computes the router's choice alone");
  if constexpr (facts::resolves<RouterType>()) {
    auto const c = router_.resolved();
    if (c.num_zero_experts > 0) refuse("zero experts: it does not report their weights");
    if (c.num_joint_shared > 0) refuse("weights of shared experts: it does not report them");
    if (c.hash_table != nullptr) refuse("hash routing: it gets logits, not token ids");
    if (c.expert_capacity > 0) refuse("an expert capacity: it sees the rows of all ranks");
  }
}

/// What the exchange moves: a column for each choice, or for each logit.
template <class C>
auto Layer<C>::exchange_shape() const -> Shape<typename Parts<C>::Config> {
  if constexpr (kMonolithic) {
    return Shape<typename Parts<C>::Config>(shape_, router_.num_logits());
  } else {
    return shape_;
  }
}

template <class C>
ExpertPlacement Layer<C>::all_experts(ExpertPlacement const& routed) const {
  return routed.ep_size() == 1 ? routed : routed.with_shared(router_.num_slots() - router_.topk());
}

/// E_CONFIG if same_rows lies outside the placement's ranks.
template <class C>
void Layer<C>::take_shared(Comm const& comm, Params const& p) {
  if (router_.num_slots() == router_.topk() || p.placement.ep_size() == 1) return;
  int const rank = facts::expert_rank(p.backend, comm.rank());
  SameRows const same = p.same_rows.ranks == 0 ? SameRows{rank, 1} : p.same_rows;
  if (same.first < 0 || same.ranks < 1 || same.first > p.placement.ep_size() - same.ranks) {
    throw Error(ErrorCode::config, text("same_rows: ranks [", same.first, ", ", same.first + same.ranks, ") are not among the placement's ",
                                        p.placement.ep_size()));
  }
  int const fused = router_.num_slots() - router_.topk();
  shared_ = {.first = p.placement.num_physical() + same.first * fused, .ranks = same.ranks};
}

/// Local ids index the weights. A batched exchange gives a block for each local expert of the placement, and experts read a block for each
/// expert of the weights. The experts check weights without a matrix; the exchange checks a placement for another number of ranks.
template <class C>
void Layer<C>::check_local_experts(Weights const& weights, ExpertPlacement const& placement, int rank, int num_ranks) {
  std::int64_t const held = weights.w13.codes.extent(0);
  if (weights.unset_expert >= 0) {
    throw Error(ErrorCode::state, text("expert weights: expert ", weights.unset_expert, " of ", held,
                                       " was never set. Fix: set_expert() for each before the layer is constructed"));
  }
  if (weights.w13.rows == 0 || placement.ep_size() != num_ranks) return;
  int const owned = placement.num_local(rank);
  bool const batched = Backend::kFormat == ActivationFormat::batched;
  if (held < owned || (batched && held > owned)) {
    throw Error(ErrorCode::argument,
                text("expert weights: ", held, " experts, the placement gives rank ", rank, batched ? " exactly " : " ", owned));
  }
}

/// Weights with a norm of the experts' outputs, or without one, against what Config and the experts say of it.
template <class C>
void Layer<C>::check_expert_norm(ExpertNormWeights const& norm, std::int64_t hidden) {
  constexpr ExpertNorm kStated = kExpertNorm<Config>;
  auto const fail = [](ErrorCode code, auto const&... words) { throw Error(code, text("expert weights: ", words...)); };
  if (!norm.given()) {
    if (kStated == ExpertNorm::always) fail(ErrorCode::argument, "norm is missing, and the layer's configuration has expert_norm");
    return;
  }
  if (kStated == ExpertNorm::none) fail(ErrorCode::config, "norm is given, and the layer's configuration has no expert_norm");
  if (!facts::normalises_output<Experts>()) {
    fail(ErrorCode::unsupported, "norm: ", Experts::kName, " cannot normalise an expert's output before the weighted sum. ",
         "Fix: choose experts that declare kNormalisesOutput, as the reference experts do");
  }
  if (norm.scale.extent(0) != hidden) fail(ErrorCode::argument, "norm has ", norm.scale.extent(0), " elements, expected ", hidden);
  if (norm.scale.data_handle() == nullptr) fail(ErrorCode::argument, "norm is a null pointer for ", hidden, " elements");
  if (!(norm.eps > 0.0F && norm.eps < HUGE_VALF)) fail(ErrorCode::config, "norm: eps ", norm.eps, " is not above 0 and finite");
}

template <class C>
void Layer<C>::check_mapping(ExpertPlacement const& placement, typename Backend::Params const& backend) const {
  if (!maps()) {
    for (int id = 0; id < placement.num_physical(); ++id) {
      if (placement.logical(id) != id) {
        throw Error(ErrorCode::state,
                    text("EPLB enabled but logical_to_physical is not set: physical expert ", id, " is expert ", placement.logical(id)));
      }
    }
    int const expected = placement.ep_size() == 1 ? shape_.num_experts() : router_.num_experts();
    if (placement.num_physical() != expected) {
      throw Error(ErrorCode::config,
                  text("placement: ", placement.num_physical(), " physical experts, without a mapping expected num_experts ", expected));
    }
    return;
  }
  routing::validate(mapping_);
  auto expect = [](char const* what, int value, int wanted) {
    if (value != wanted) {
      throw Error(ErrorCode::config, text("mapping: ", what, " is ", value, ", the layer has ", wanted));
    }
  };
  expect("num_experts", mapping_.num_experts, router_.num_experts());
  expect("num_physical", mapping_.num_physical, placement.num_physical());
  if (kBatchInvariant<Config> && mapping_.num_physical > mapping_.num_experts && sums_by_rank(backend)) {
    throw Error(ErrorCode::config,
                text("batch_invariant: ", mapping_.num_physical, " physical experts for ", mapping_.num_experts,
                     ": which replica a token goes to, and so which of its outputs one rank adds, depends on its position in "
                     "the batch. Have one replica of each, or a backend that returns every choice's output"));
  }
}

/// Whether a token's outputs are added on the ranks of its experts before they come back.
template <class C>
bool Layer<C>::sums_by_rank(typename Backend::Params const& backend) {
  return Backend::kReduction != TopKReduction::backend || facts::deduplicates(backend);
}

}  // namespace moe::detail
