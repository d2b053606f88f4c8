// SPDX-License-Identifier: Apache-2.0
// runner/reduction.hpp: which sums over tensor-parallel ranks a block of a model needs, as a pure function of the parallel configuration
// and the backend's transport. docs/semantics/runner.md §2.
#pragma once

#include <cstdint>
#include <string_view>

#include "moe/parallel/config.hpp"

namespace moe::runner {

/// What one rank's shared experts give.
enum class SharedOutput : std::uint8_t {
  none,      ///< there are none
  partial,   ///< a term of a sum over the TP group: each rank has a part of their columns
  complete,  ///< the whole output: every rank has all columns
};
/// The step between the routed sum and the block's width.
enum class OutputStep : std::uint8_t {
  none,
  linear,     ///< without bias: commutes with a sum over ranks
  nonlinear,  ///< a norm or a bias: needs the complete sum
};

/// What the reductions depend on.
struct ReductionFacts {
  int tp_size = 1;
  int moe_tp_size = 1;  ///< ranks that an expert's columns are split over
  int ep_size = 1;
  int sp_size = 1;  ///< TP if each TP rank routes rows of its own, else 1
  Transport transport = Transport::local;
  SharedOutput shared = SharedOutput::none;
  OutputStep output = OutputStep::none;
  bool reduce_results = true;  ///< false: the caller sums the block's output over the TP group if it is partial
  bool nonlinear_end = false;  ///< a norm over the block's sum
};

/// The reductions of one forward, all over the TP group, in the order of the members.
struct ReductionPlan {
  bool routed_partial = false;  ///< the layer's output is a term of a sum over the TP group
  bool routed_early = false;    ///< sum the routed output alone, before the output step
  bool shared_early = false;    ///< sum the shared output alone: no later sum would include it
  bool final = false;           ///< sum routed and partial shared output together
  bool result_partial = false;  ///< the block's output remains a term of a sum, which the caller does
  bool operator==(ReductionPlan const&) const = default;
};

/// Whether the layer's output is complete although the layer is tensor parallel: its transport has summed it.
constexpr bool output_is_reduced(ReductionFacts const& f) { return f.transport == Transport::all_to_all && f.moe_tp_size == 1; }

/// Whether the layer's output is a term of a sum over the TP group. Sums over other ranks are the transport's.
constexpr bool routed_is_partial(ReductionFacts const& f) {
  bool const split = f.moe_tp_size > 1 || f.ep_size > 1;
  return f.tp_size > 1 && f.sp_size == 1 && split && !output_is_reduced(f);
}

/// Whether the shared output must be summed alone. Adding a term of a sum to a complete routed output, and then summing both or neither, is
/// wrong.
constexpr bool must_reduce_shared(ReductionFacts const& f) {
  return f.shared == SharedOutput::partial && f.tp_size > 1 && !routed_is_partial(f);
}

constexpr ReductionPlan plan_reductions(ReductionFacts const& f) {
  ReductionPlan plan;
  plan.routed_partial = routed_is_partial(f);
  plan.shared_early = must_reduce_shared(f);
  if (!plan.routed_partial) return plan;
  bool const needs_sum = f.output == OutputStep::nonlinear || f.nonlinear_end;
  if (f.output != OutputStep::none && (f.reduce_results || needs_sum)) {
    plan.routed_early = true;
    plan.shared_early = f.shared == SharedOutput::partial;
    return plan;
  }
  plan.final = f.reduce_results || needs_sum;
  plan.result_partial = !plan.final;
  return plan;
}

/// The facts of a rank's coordinates in the grid.
constexpr ReductionFacts reduction_facts(MoeParallel const& p) {
  return {.tp_size = p.tp_size, .moe_tp_size = p.moe_tp_size, .ep_size = p.ep_size, .sp_size = p.sp_size, .transport = p.backend.transport};
}

/// The ranks that the layer's communicator connects.
enum class LayerGroup : std::uint8_t {
  self,    ///< this rank alone
  tokens,  ///< the DP or PCP group: ranks of different tokens, with the same index in the TP group
  ep,      ///< all ranks among which the experts are divided
};
constexpr std::string_view name(LayerGroup group) {
  return group == LayerGroup::self ? "self" : group == LayerGroup::tokens ? "tokens" : "ep";
}

/// A gathering backend under sequence parallel gathers over the EP group, because TP peers hold different rows then. A local backend stays
/// alone.
constexpr LayerGroup layer_group(MoeParallel const& p) {
  switch (p.backend.transport) {
    case Transport::local: return LayerGroup::self;
    case Transport::gather: return p.use_sp_moe() ? LayerGroup::ep : LayerGroup::tokens;
    case Transport::all_to_all: return LayerGroup::ep;
  }
  return LayerGroup::self;
}
constexpr int layer_group_size(MoeParallel const& p) {
  switch (layer_group(p)) {
    case LayerGroup::self: return 1;
    case LayerGroup::tokens: return p.dp_size * p.pcp_size;
    case LayerGroup::ep: return p.ep_size;
  }
  return 1;
}

/// The sentence on what a grid and a backend's transport cannot do together, or null.
constexpr char const* parallel_conflict(MoeParallel const& p) {
  if (p.backend.transport == Transport::all_to_all && !p.use_ep && p.flat_size > 1) {
    return "this backend sends tokens to the ranks of their experts, and without expert parallelism every rank holds a part of each. Fix: "
           "enable expert parallelism, or choose naive or allgather_reduce_scatter";
  }
  if (p.backend.transport == Transport::local && p.tokens_differ()) {
    return "the ranks hold different tokens, and this backend moves none. Fix: choose naive or allgather_reduce_scatter, or, with expert "
           "parallelism, any other";
  }
  if (p.moe_tp_size > 1 && p.use_sp_moe()) {
    return "sequence parallelism gives each TP rank rows of its own, and with moe_tp_size above 1 each has a part of an expert's columns. "
           "Fix: moe_tp_size = 1";
  }
  if (p.moe_tp_size > 1 && p.ep_size > 1) {
    if (p.backend.transport == Transport::all_to_all && p.moe_tp_size != p.tp_size) {
      return "this backend sends rows only between ranks that hold the same part of the experts' columns, so the sum over the TP group "
             "must "
             "add all parts: explicit moe_tp_size must be tp_size. Fix: moe_tp_size = tp_size, or choose naive or allgather_reduce_scatter";
    }
    if (p.tp_size % p.moe_tp_size != 0 && p.moe_tp_size % p.tp_size != 0) {
      return "explicit moe_tp_size must divide tp_size or be a multiple of it. Fix: moe_tp_size = tp_size";
    }
  }
  return nullptr;
}

}  // namespace moe::runner
