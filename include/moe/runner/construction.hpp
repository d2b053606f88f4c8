// SPDX-License-Identifier: Apache-2.0
// runner/construction.hpp: the construction of a runner: its parts, then its layer, then its memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moe/core/contract/facts.hpp"
#include "moe/core/contract/params.hpp"
#include "moe/core/error.hpp"
#include "moe/parallel/construction.hpp"
#include "moe/runner/declaration.hpp"

namespace moe {

template <class LayerT, class PartsT>
Runner<LayerT, PartsT>::Runner(Comm& comm, typename Layer::Weights const& experts, Params const& p)
    : sizes_(sizes(p)),
      kernel_hidden_(kernel_hidden(p)),
      scaling_(p.scaling),
      end_(p.end),
      gate_(detail::build(comm,
                          [&] {
                            if constexpr (Parts::Gate::kInside) {
                              return Part<typename Parts::Gate>(p.gate, sizes_, arena_);
                            } else {
                              return runner::detail::Nothing{};
                            }
                          })),
      input_(detail::build(
          comm, [&] { return transform<typename Parts::Input>("input projection", p.input, sizes_.hidden, sizes_.expert_hidden); })),
      output_(detail::build(
          comm, [&] { return transform<typename Parts::Output>("output projection", p.output, sizes_.expert_hidden, sizes_.hidden); })),
      shared_(detail::build(comm,
                            [&] {
                              if constexpr (kHasShared) {
                                return Part<typename Parts::Shared>(p.shared, sizes_, arena_);
                              } else {
                                return runner::detail::Nothing{};
                              }
                            })),
      group_(detail::build(comm,
                           [&] {
                             if constexpr (kParallel) {
                               return decltype(group_)(p.parallel, comm.size());
                             } else {
                               return runner::detail::Nothing{};
                             }
                           })),
      plan_(plan(p)),
      layer_(comm, experts, layer_params(p)),
      halved_([&] {
        if constexpr (kDualBatch) {
          return decltype(halved_)(comm, layer_, experts, layer_params(p), p.dual_batch, arena_);
        } else {
          return runner::detail::Nothing{};
        }
      }()),
      chunks_(detail::build(comm, [&] {
        if constexpr (kChunked) {
          return Chunks(comm, p.chunking, sizes_.max_rows);
        } else {
          return Chunks{};
        }
      })) {
  detail::build(comm, [&] {
    check(p);
    check_expert_norm(experts.norm, p);
    take_memory(p);
  });
  detail::agree_on_construction(comm);
  if constexpr (kParallel) group_.connect();
}

// Not "= default", which a model library cannot instantiate alone.
template <class LayerT, class PartsT>
Runner<LayerT, PartsT>::~Runner() {}  // NOLINT(modernize-use-equals-default)

template <class LayerT, class PartsT>
auto Runner<LayerT, PartsT>::layer_params(Params const& p) -> typename Layer::Params {
  typename Layer::Params out = p.layer;
  if constexpr (kParallel && facts::takes_expert_rank<decltype(out.backend)>()) out.backend.expert_rank = p.parallel.moe.ep_rank;
  if constexpr (kParallel) {
    MoeParallel const& moe = p.parallel.moe;
    if (moe.sp_size == 1 && moe.backend.transport != Transport::all_to_all) {
      int const ranks = std::max(moe.tp_size / moe.moe_tp_size, 1);
      if (moe.ep_size > 1) out.same_rows = {moe.ep_rank / ranks * ranks, ranks};
    }
  }
  return out;
}

template <class LayerT, class PartsT>
runner::ReductionPlan Runner<LayerT, PartsT>::plan([[maybe_unused]] Params const& p) {
  if constexpr (kParallel) {
    runner::ReductionFacts facts = runner::reduction_facts(p.parallel.moe);
    facts.reduce_results = p.parallel.reduce_results;
    facts.nonlinear_end = p.end.normalise;
    if constexpr (kHasShared) facts.shared = Parts::Shared::output_of(p.shared);
    if constexpr (kHasOutput) facts.output = Parts::Output::step(p.output);
    return runner::plan_reductions(facts);
  } else {
    return {};
  }
}

template <class LayerT, class PartsT>
std::int64_t Runner<LayerT, PartsT>::kernel_hidden(Params const& p) {
  return Layer::Config::hidden == dynamic ? p.layer.shape.hidden : Layer::Config::hidden;
}

template <class LayerT, class PartsT>
runner::Sizes Runner<LayerT, PartsT>::sizes(Params const& p) {
  runner::Sizes out;
  out.expert_hidden = p.expert_hidden == 0 ? kernel_hidden(p) : p.expert_hidden;
  out.hidden = p.hidden == 0 ? out.expert_hidden : p.hidden;
  out.max_rows = std::max<std::int64_t>(p.layer.max_tokens_per_rank, 0);  // the layer refuses less
  return out;
}

template <class LayerT, class PartsT>
template <class Policy>
auto Runner<LayerT, PartsT>::transform(char const* name, typename Policy::Params const& p, std::int64_t in, std::int64_t out)
    -> Part<Policy> {
  if constexpr (runner::detail::kPresent<Policy>) {
    return Part<Policy>(name, p, in, out, sizes_, arena_);
  } else {
    if (in != out) throw Error(ErrorCode::config, text(name, ": there is none, and the width changes from ", in, " to ", out));
    return {};
  }
}

template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::check([[maybe_unused]] Params const& p) const {
  if (sizes_.expert_hidden > kernel_hidden_) {
    throw Error(ErrorCode::config, text("expert_hidden: ", sizes_.expert_hidden, " exceeds the layer's hidden ", kernel_hidden_));
  }
  auto const& router = layer_.router();
  if constexpr (Parts::Gate::kInside) {
    if (gate_.num_logits() != router.num_logits()) {
      throw Error(ErrorCode::config, text("gate: ", gate_.num_logits(), " logits, the router takes ", router.num_logits()));
    }
  }
  float const weights = facts::routed_scaling_factor(router);
  float const output = scaling_.routed != 1.0F ? scaling_.routed : scaling_.shared;
  if (weights != 1.0F && output != 1.0F && !scaling_.beside_weights) {
    throw Error(ErrorCode::config,
                text("routed_scaling_factor: ", weights, " in the routing weights and ", output, " on the output. Set one of them to 1"));
  }
  if constexpr (kParallel && kHasShared) {
    if (p.parallel.moe.use_sp_moe() && Parts::Shared::output_of(p.shared) == runner::SharedOutput::partial) {
      throw Error(ErrorCode::config,
                  "shared experts: sequence parallelism gives each TP rank rows of its own, so each rank needs all columns. "
                  "Set sharding to complete");
    }
  }
  int const zero = facts::num_zero_experts(router);
  if (!kHasZeroExperts && zero > 0) {
    throw Error(ErrorCode::config, text("zero experts: the router has ", zero, ", the runner adds none. Set ZeroExperts of its parts"));
  }
}

/// E_UNSUPPORTED where the layer's rows are not whole outputs of experts, which a norm of them needs.
template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::check_expert_norm(ExpertNormWeights const& norm, [[maybe_unused]] Params const& p) const {
  if (!norm.given()) return;
  auto const refuse = [](auto const&... words) {
    throw Error(ErrorCode::unsupported, text("norm of the experts' outputs: an output is normalised as a whole, and ", words...));
  };
  if constexpr (kParallel) {
    int const parts = p.parallel.moe.moe_tp_size;
    if (parts > 1) refuse(parts, " tensor-parallel ranks hold a part of each expert. Fix: expert parallelism, or no tensor parallelism");
  }
  if (kernel_hidden_ > sizes_.expert_hidden) {
    refuse("expert_hidden ", sizes_.expert_hidden, " is padded to ", kernel_hidden_, " columns. Fix: a layer of that hidden");
  }
}

template <class LayerT, class PartsT>
void Runner<LayerT, PartsT>::take_memory([[maybe_unused]] Params const& p) {
  auto const& router = layer_.router();
  if constexpr (kHasZeroExperts) {
    num_zero_ = facts::num_zero_experts(router);
    zero_kind_ = facts::zero_expert_kind(router, zero_kind_);
  }
  num_joint_ = facts::num_joint_shared(router);
  if (plan_.final) sum_ = arena_.template take<Act>(sizes_.max_rows * sizes_.hidden);
  if constexpr (kHasShared) shared_output_ = Parts::Shared::output_of(p.shared);
  if constexpr (kSharedFitsBetween) shared_between_ = p.overlap_shared && shared_.active() && !shared_.takes_routing_weights();
  if constexpr (kHasShared) factor_ = p.shared.average && shared_output_ != runner::SharedOutput::none ? 0.5F : 1.0F;
  if (kernel_hidden_ > sizes_.expert_hidden) padded_ = arena_.template take<Act>(sizes_.max_rows * kernel_hidden_);
  if (!kPlain || kernel_hidden_ > sizes_.expert_hidden) routed_ = arena_.template take<Act>(sizes_.max_rows * kernel_hidden_);
  if (num_joint_ > 0) joint_ = arena_.template take<float>(sizes_.max_rows * num_joint_);
  if constexpr (kChunked) {
    zeros_ = arena_.template take_filled<std::byte>(std::max(sizes_.hidden, static_cast<std::int64_t>(router.num_logits())) * 4, 0);
    dummy_ = arena_.template take<Act>(sizes_.hidden);
  }
  if (shared_.takes_routing_weights()) {
    if constexpr (kHasShared) {
      if (num_joint_ != p.shared.count) {
        throw Error(ErrorCode::config,
                    text("shared experts: ", p.shared.count, ", and the router gives ", num_joint_, " weights for them"));
      }
    }
  }
  arena_.seal();
}

}  // namespace moe
