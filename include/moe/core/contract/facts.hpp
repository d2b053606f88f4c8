// SPDX-License-Identifier: Apache-2.0
// core/contract/facts.hpp: optional facts of a policy, each with its default. Layers, exchanges and rules read these functions instead
// of the members. Those of an exchange are in core/contract/exchange.hpp, included here, of a policy's Params in core/contract/params.hpp,
// of communicators in core/contract/communicator.hpp, of experts that route inside in core/contract/monolithic.hpp.
#pragma once

#include <cstdint>

#include "moe/core/contract/exchange.hpp"

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

/// Router::resolved(): every choice that it makes, as a routing::RouterConfig. Ranks compare them, checks read zero experts and capacity.
/// Default: ranks compare the router's name and sizes; it has no zero experts and no capacity.
template <class Router>
constexpr bool resolves() {
  return requires(Router const& router) { router.resolved(); };
}

/// Router::config().routed_scaling_factor: the factor in its weights. Default: 1.
template <class Router>
constexpr float routed_scaling_factor([[maybe_unused]] Router const& router) {
  if constexpr (requires { router.config().routed_scaling_factor; }) {
    return router.config().routed_scaling_factor;
  } else {
    return 1.0F;
  }
}
/// Router::config().num_zero_experts: ids E … E+Z-1 name experts without weights, whose outputs a runner adds. Default: 0.
template <class Router>
constexpr int num_zero_experts([[maybe_unused]] Router const& router) {
  if constexpr (requires { router.config().num_zero_experts; }) {
    return router.config().num_zero_experts;
  } else {
    return 0;
  }
}
/// Router::config().zero_expert_kind: what zero experts compute, for a router with num_zero_experts. Default: `none`.
template <class Kind, class Router>
constexpr Kind zero_expert_kind([[maybe_unused]] Router const& router, [[maybe_unused]] Kind none) {
  if constexpr (requires { router.config().num_zero_experts; }) {
    return router.config().zero_expert_kind;
  } else {
    return none;
  }
}
/// Router::config().num_joint_shared: shared experts whose weights it computes with those of the chosen experts. Default: 0.
template <class Router>
constexpr int num_joint_shared([[maybe_unused]] Router const& router) {
  if constexpr (requires { router.config().num_joint_shared; }) {
    return router.config().num_joint_shared;
  } else {
    return 0;
  }
}

/// Quantization::kShapeMultiple: hidden and intermediate are multiples of it, which an error then names. Default: supports() alone decides.
template <class Quant>
constexpr bool has_shape_multiple() {
  return requires { Quant::kShapeMultiple; };
}
/// Quantization::params.scale: the scale of every activation, as the checkpoint gives it; equal on all ranks. Default: none is given.
template <class Quant>
constexpr bool has_static_scale() {
  return requires(Quant const& quant) { quant.params.scale; };
}
/// Quantization::act.global_scale: a second scale of all activations; equal on all ranks. Default: there is none.
template <class Quant>
constexpr bool has_global_scale() {
  return requires(Quant const& quant) { quant.act.global_scale; };
}
/// Quantization::act.amax_upper_bound: the largest |x| of a row that its scale counts; larger values saturate. Default: every finite value
/// counts.
template <class Quant>
constexpr bool bounds_amax() {
  return requires(Quant const& quant) { quant.act.amax_upper_bound; };
}
/// Quantization::WeightCodec: the codec of its weights (quantization/format/codecs.hpp). Default: packed checkpoints of integers are not
/// read into its codes.
template <class Quant>
constexpr bool has_weight_codec() {
  return requires { typename Quant::WeightCodec; };
}
/// Quantization::quantize_row() also takes a Row that computes its elements, so experts quantise what they have just computed. Default: it
/// takes arrays.
template <class Quant, class Row>
constexpr bool quantizes_computed_rows() {
  return requires(Quant const& quant, Row const& row, typename Quant::template Payload<float>* codes, typename Quant::Scale* scales) {
    quant.template quantize_row<float>(row, std::int64_t{1}, codes, scales);
  };
}

/// Activation::kKind: the kind of activation::Kind that its type fixes. Default: it fixes none, and kernels written for kinds refuse it.
template <class Activation>
constexpr bool fixes_kind() {
  return requires { Activation::kKind; };
}
/// Activation::kind: the kind, chosen at run time; equal on all ranks. Default: the type decides.
template <class Activation>
constexpr bool chooses_kind() {
  return requires(Activation const& activation) { activation.kind; };
}
/// Activation::constants: the activation::Constants of its formula; equal on all ranks. Default: it has none.
template <class Activation>
constexpr bool has_constants() {
  return requires(Activation const& activation) { activation.constants; };
}

/// Backend::Window: the exchange moves rows through a window that ranks map; its header is one of backends/window/. Default: it is a
/// collective exchange.
template <class Backend>
constexpr bool has_window() {
  return requires { typename Backend::Window; };
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

/// Experts::takes(kind, weight_on_input): whether they compute a layer whose activation is known only at run time. Default: any.
template <class Experts, class Kind>
constexpr bool takes([[maybe_unused]] Kind kind, [[maybe_unused]] bool weight_on_input) {
  if constexpr (requires { Experts::takes(kind, weight_on_input); }) {
    return Experts::takes(kind, weight_on_input);
  } else {
    return true;
  }
}

/// Experts::kNormalisesOutput: where Config::expert_norm is not none and the weights have a norm (ExpertWeights::norm), each expert's
/// output goes through it before the router's weight. Default: no; weights with a norm are refused.
template <class Experts>
constexpr bool normalises_output() {
  if constexpr (requires { Experts::kNormalisesOutput; }) {
    return Experts::kNormalisesOutput;
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

/// Kernel::RowsAsTheyAre: for a kernel that quantises rows itself, the quantisation in which it reads them from a backend that does not
/// send them to other ranks. Default: the layer's quantisation.
template <class Kernel, class Quant>
struct RowsRead {
  using type = Quant;
};
template <class Kernel, class Quant>
  requires requires { typename Kernel::RowsAsTheyAre; }
struct RowsRead<Kernel, Quant> {
  using type = typename Kernel::RowsAsTheyAre;
};

/// Kernel::weights_changed(stream): the bytes of the weights were replaced in place; a kernel with its own copy of the weights rebuilds the
/// copy in stream order. Default: the kernel reads the weights where they lie.
template <class Kernel, class StreamT>
constexpr bool copies_weights() {
  return requires(Kernel& kernel, StreamT stream) { kernel.weights_changed(stream); };
}
template <class Kernel, class StreamT>
void weights_changed([[maybe_unused]] Kernel& kernel, [[maybe_unused]] StreamT stream) {
  if constexpr (copies_weights<Kernel, StreamT>()) kernel.weights_changed(stream);
}

/// Kernel::tuning(): the tiles and stages that it chose, as a text for a log. Default: the log has the name of the experts alone.
template <class Kernel>
constexpr bool has_tuning() {
  return requires(Kernel& kernel) { kernel.tuning(); };
}

/// capturable() of an exchange or a kernel: whether its calls can go into a CUDA graph. Default: they can.
template <class Part>
constexpr bool may_not_capture() {
  return requires(Part& part) { part.capturable(); };
}
template <class Part>
bool capturable([[maybe_unused]] Part& part) {
  if constexpr (may_not_capture<Part>()) {
    return part.capturable();
  } else {
    return true;
  }
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

}  // namespace moe::facts
