// SPDX-License-Identifier: Apache-2.0
// modular_kernel.hpp: one MoE layer as five compile-time choices. It depends on the concepts and the rules and on no policy.
#pragma once

#include <type_traits>

#include "moe/core/contract/check.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/layer/construction.hpp"
#include "moe/layer/contract.hpp"
#include "moe/layer/forward.hpp"
#include "moe/layer/layer.hpp"

namespace moe {

namespace detail {

/// The layer if all contracts and rules hold. Otherwise only the error of the first broken one, so that no further errors follow.
template <class C, bool Legal = C::kLegal>
struct LayerOrError {
  using type = typename C::Error;
};
template <class C>
struct LayerOrError<C, true> {
  using Broken = BrokenPart<C>;
  using type = typename std::conditional_t<std::is_same_v<Broken, NoBrokenRule>, std::type_identity<Layer<C>>,
                                           std::type_identity<typename Broken::template Error<true>>>::type;
};

}  // namespace detail

/// One MoE layer on one rank of an expert-parallel group: router → prepare → experts → finalize, all by static type. A composition of
/// which a policy lacks a member of its contract, or that breaks a rule of core/contract/check.hpp, does not compile, and the first error
/// is one sentence. layer/layer.hpp has the members.
///
/// A layer is immovable: kernels, captured graphs and peers hold addresses inside it. Where it must be built late or live longer than a
/// scope, keep it in a std::optional (emplace) or a std::unique_ptr.
template <class Config, class RouterPolicy, class QuantizationPolicy, class Backend, class ExpertsPolicy>
class ModularKernel : public detail::LayerOrError<Composition<Config, RouterPolicy, QuantizationPolicy, Backend, ExpertsPolicy>>::type {
  using Base = typename detail::LayerOrError<Composition<Config, RouterPolicy, QuantizationPolicy, Backend, ExpertsPolicy>>::type;

 public:
  using Base::Base;
  // Immovable: kernels, graphs and peers hold its addresses. Fix: keep it in std::optional or std::unique_ptr
  ModularKernel(ModularKernel&&) = delete;
  ModularKernel& operator=(ModularKernel&&) = delete;
};

}  // namespace moe
