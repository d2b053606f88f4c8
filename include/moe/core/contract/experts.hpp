// SPDX-License-Identifier: Apache-2.0
// core/contract/experts.hpp: what an Experts policy must have, and its kernel, which a layer owns.
#pragma once

#include <concepts>
#include <cstdint>
#include <tuple>

#include "moe/core/buffer.hpp"
#include "moe/core/contract/policy.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/rule.hpp"
#include "moe/core/tokens.hpp"
#include "moe/core/types.hpp"

namespace moe {

// ---- The policy.

template <class E>
concept ExpertsHaveReads = requires {
  { E::reads(ActivationFormat::standard) } -> std::same_as<bool>;
};
MOE_MEMBER(ExpertsHaveReads, "the experts policy", "static constexpr bool reads(ActivationFormat)",
           "whether they take rows in this format");

template <class E>
concept ExpertsHaveReduction = requires {
  { E::reduction(ActivationFormat::standard) } -> std::same_as<TopKReduction>;
};
MOE_MEMBER(ExpertsHaveReduction, "the experts policy", "static constexpr TopKReduction reduction(ActivationFormat)",
           "who applies the router weights and sums over the top-k");

template <class E, class Act, class Weight>
concept ExpertsHaveElement = requires {
  { E::template supports_element<Act, Weight>() } -> std::same_as<bool>;
};
MOE_MEMBER(ExpertsHaveElement, "the experts policy", "template <class Act, class Weight> static constexpr bool supports_element()",
           "whether they take these element types");

template <class E, class Activation>
concept ExpertsHaveActivation = requires {
  { E::template supports_activation<Activation>() } -> std::same_as<bool>;
};
MOE_MEMBER(ExpertsHaveActivation, "the experts policy", "template <class Activation> static constexpr bool supports_activation()",
           "whether they have this activation");

template <class E, class Quant>
concept ExpertsHaveQuantization = requires {
  { E::template supports_quantization<Quant>() } -> std::same_as<bool>;
};
MOE_MEMBER(ExpertsHaveQuantization, "the experts policy", "template <class Quant> static constexpr bool supports_quantization()",
           "whether they read this scheme");

template <class E, class Config, class Quant>
concept ExpertsHaveFitsShape = requires {
  { E::template fits_shape<Config, Quant>() } -> std::same_as<bool>;
};
MOE_MEMBER(ExpertsHaveFitsShape, "the experts policy", "template <class Config, class Quant> static constexpr bool fits_shape()",
           "whether hidden and intermediate are multiples of what they work in");

/// Computes the experts of this rank.
template <class E, class Config, class Quant, ActivationFormat Format>
concept ExpertsHaveKernel = requires { typename E::template Kernel<Config, Quant, Format>; };
MOE_MEMBER(ExpertsHaveKernel, "the experts policy", "template <class Config, class Quant, ActivationFormat Format> class Kernel",
           "computes the experts of this rank");

namespace detail {
template <class E>
using ExpertsContract =
    std::tuple<Verdict<rules::PolicyHasName, Named<E>, E>, Verdict<rules::PolicyHasSpace, HasSpace<E>, E>,
               Verdict<rules::PolicyHasParams, HasParams<E>, E>, Verdict<rules::ExpertsHaveReads, ExpertsHaveReads<E>, E>,
               Verdict<rules::ExpertsHaveReduction, ExpertsHaveReduction<E>, E>>;
template <class E, class Config, class Quant>
using ExpertsContractFor =
    std::tuple<Verdict<rules::ExpertsHaveElement, ExpertsHaveElement<E, typename Config::Act, typename Config::Weight>, E>,
               Verdict<rules::ExpertsHaveActivation, ExpertsHaveActivation<E, typename Config::Activation>, E>,
               Verdict<rules::ExpertsHaveQuantization, ExpertsHaveQuantization<E, Quant>, E>,
               Verdict<rules::ExpertsHaveFitsShape, ExpertsHaveFitsShape<E, Config, Quant>, E>>;
}  // namespace detail

template <class E>
concept Experts = detail::kAllHold<detail::ExpertsContract<E>>;

// ---- Its kernel.

template <class K>
concept KernelHasOutput = requires { typename K::Output; };
MOE_MEMBER(KernelHasOutput, "the experts kernel", "using Output", "element of the rows that it writes");

/// The third argument: the most rows, or rows per expert, that apply() gets. The weights are borrowed.
template <class K, class E, class Config, class Quant>
concept KernelIsBuilt = std::constructible_from<K, Shape<Config> const&, WeightsOf<Config, Quant> const&, std::int64_t, Quant const&,
                                                typename Config::Activation const&, typename E::Params const&, Arena<typename E::Space>&>;
MOE_MEMBER(
    KernelIsBuilt, "the experts kernel",
    "Kernel(Shape<Config> const&, WeightsOf<Config, Quant> const&, int64_t max_rows, Quant const&, Activation const&, Params const&, "
    "Arena<Space>&)",
    "construction");

/// Rows of the exchange → its expert_output(). Enqueues on the device.
template <class K, class Tokens, class Out, class StreamT>
concept KernelApplies = requires(K& k, Tokens const& tokens, Out out, StreamT stream) { k.apply(tokens, out, stream); };
MOE_MEMBER(KernelApplies, "the experts kernel",
           "apply(StandardTokensOf or BatchedTokensOf<Config, Quant>, Rows or Blocks<Output>, Stream<Space>)",
           "reads the rows that the exchange delivers, writes its expert_output()");

}  // namespace moe
