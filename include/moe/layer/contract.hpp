// SPDX-License-Identifier: Apache-2.0
// layer/contract.hpp: the kernel and the exchange that a legal composition owns, and the checks of their members. Unlike the rules of
// core/contract/check.hpp this instantiates the two classes.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "moe/core/contract/check.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/parallel/placement.hpp"
#include "moe/routing/row/route_args.hpp"

namespace moe {

namespace rules {
MOE_RULE(ExchangeIsDefined,
         "moe: the backend's exchange is declared and not defined. "
         "Fix: include the header that defines it before the layer is named (docs/errors.md#missing-include)");
MOE_RULE(KernelIsDefined,
         "moe: the experts' kernel is declared and not defined. "
         "Fix: include the header that defines it before the layer is named (docs/errors.md#missing-include)");
MOE_RULE(BackendReturnsElement,
         "moe: the backend cannot bring back expert outputs of this element type. "
         "Fix: choose experts that write bf16 or float, or a backend that returns every element (docs/errors.md#backend-output)");
MOE_RULE(DispatchOverlaps,
         "moe: the configuration asks for dispatch and experts in one schedule, which this exchange or these experts cannot run. "
         "Fix: pair HighThroughput between GPUs with HopperContiguous or LowLatency between GPUs with HopperMasked, rows unquantised or in "
         "fp8 blocks of 128, or drop overlap_dispatch (docs/errors.md#dispatch-overlaps)");
MOE_RULE(CombineOverlaps,
         "moe: the configuration asks for experts and combine in one schedule, which this exchange or these experts cannot run. "
         "Fix: pair HighThroughput between GPUs with HopperContiguous, outputs in bf16, rows unquantised or in fp8 blocks of 128, or drop "
         "overlap_combine (docs/errors.md#combine-overlaps)");
}  // namespace rules

/// Routes a batch on the host. routing/row/route_args.hpp defines inputs and outputs.
template <class R>
concept RouterSelectsOnHost = requires(R const& r, routing::RouteArgs<float> const& args) { r.select(args); };
MOE_MEMBER(RouterSelectsOnHost, "the router", "template <class L> void select(routing::RouteArgs<L> const&) const",
           "routes a batch on the host");
/// Routes a batch on the device. With a mapping the layer calls routing::route_fused() instead, where facts::chooses_by_row() says so.
template <class R>
concept RouterSelectsOnDevice =
    requires(R const& r, routing::RouteArgs<float> const& args, Stream<space::cuda> stream) { r.select(args, stream); };
MOE_MEMBER(RouterSelectsOnDevice, "the router", "template <class L> void select(routing::RouteArgs<L> const&, cudaStream_t) const",
           "routes a batch on the device; routing::RowRouter<Config> has it");

namespace detail {

/// The member templates that are the types of the two objects.
template <class C>
struct PartTemplates {
  using type = std::tuple<
      Verdict<rules::ExpertsHaveKernel, ExpertsHaveKernel<typename C::Experts, typename C::Config, typename C::Quant, C::Backend::kFormat>,
              typename C::Experts>,
      Verdict<rules::BackendHasExchange, BackendHasExchange<typename C::Backend, typename C::Config, typename C::Quant, float>,
              typename C::Backend>>;
};

template <class C>
using KernelOf = typename C::Experts::template Kernel<typename C::Config, typename C::Quant, C::Backend::kFormat>;

/// The types of the two objects. The backend's rows are quantised by Quant or, if rows stay on their rank, in the form that the experts
/// prefer to read. Experts that route inside get the rows' logits instead of a choice.
template <class C>
struct Parts {
  using Config = std::conditional_t<facts::routes_inside<typename C::Experts>(), LogitsRows<typename C::Config>, typename C::Config>;
  using Kernel = KernelOf<C>;
  using RowQuant = typename std::conditional_t<facts::rows_stay<typename C::Backend>(), facts::RowsRead<Kernel, typename C::Quant>,
                                               std::type_identity<typename C::Quant>>::type;
  using Exchange = typename C::Backend::template Exchange<Config, RowQuant, typename Kernel::Output>;
};

template <class C>
struct KernelDefinition {
  using type = std::tuple<Verdict<rules::KernelIsDefined, IsDefined<KernelOf<C>>, KernelOf<C>>>;
};
template <class C>
struct KernelMembers {
  using type = std::tuple<
      Verdict<rules::KernelHasOutput, KernelHasOutput<KernelOf<C>>, KernelOf<C>>,
      Verdict<rules::KernelIsBuilt, KernelIsBuilt<KernelOf<C>, typename C::Experts, typename C::Config, typename C::Quant>, KernelOf<C>>>;
};

/// The rule that the backend brings back what the kernel writes, before an exchange of that element is instantiated.
template <class C>
struct OutputElement {
  using Output = typename KernelOf<C>::Output;
  using type =
      std::tuple<Verdict<rules::BackendReturnsElement, facts::returns_element<typename C::Backend, Output>(), typename C::Backend, Output>>;
};

template <class C>
struct ExchangeDefinition {
  using Exchange = typename Parts<C>::Exchange;
  using type = std::tuple<Verdict<rules::ExchangeIsDefined, IsDefined<Exchange>, Exchange>>;
};
/// The rule of the header that defines the exchange, for a backend whose own header only declares it.
template <class Exchange>
struct ExchangeInclude {
  using type = std::tuple<>;
};
template <class Exchange>
  requires requires { typename Exchange::MissingInclude; }
struct ExchangeInclude<Exchange> {
  using type = std::tuple<Verdict<typename Exchange::MissingInclude, false, Exchange>>;
};
template <class C>
struct ExchangeIncluded : ExchangeInclude<typename Parts<C>::Exchange> {};

template <class C>
struct ExchangeMembers {
  using type = ExchangeCalls<typename Parts<C>::Exchange, typename C::Backend, typename Parts<C>::Config, typename Parts<C>::RowQuant>;
};

/// The rules that kernel and router accept the exchange's arrays.
template <class C>
struct Meeting {
  using Config = typename C::Config;
  using Router = typename C::Router;
  using Exchange = typename Parts<C>::Exchange;
  using Kernel = typename Parts<C>::Kernel;
  using Space = typename C::Backend::Space;
  using Tokens = decltype(std::declval<Exchange&>().prepare(std::declval<RoutedTokens<typename Config::Act, Config::hidden> const&>(),
                                                            std::declval<Stream<Space>>()));
  using Out = decltype(std::declval<Exchange&>().expert_output());
  using RouterVerdict =
      std::conditional_t<Space::kKind == SpaceKind::host,
                         Verdict<rules::RouterSelectsOnHost, !facts::selects<Router>() || RouterSelectsOnHost<Router>, Router>,
                         Verdict<rules::RouterSelectsOnDevice, !facts::selects<Router>() || RouterSelectsOnDevice<Router>, Router>>;
  static constexpr bool arrivals_meet() {
    if constexpr (!kOverlapsDispatch<Config>) {
      return true;
    } else if constexpr (facts::arrives<Exchange>()) {
      return requires(Kernel& kernel, Exchange& exchange, Tokens const& tokens, Out out, Stream<Space> stream) {
        kernel.apply(tokens, out, exchange.arrivals(), stream);
      };
    } else {
      return false;
    }
  }
  static constexpr bool completions_meet() {
    if constexpr (!kOverlapsCombine<Config>) {
      return true;
    } else if constexpr (!facts::completes<Exchange>()) {
      return false;
    } else if constexpr (facts::arrives<Exchange>()) {
      return requires(Kernel& kernel, Exchange& exchange, Tokens const& tokens, Out out, Stream<Space> stream) {
        kernel.apply(tokens, out, exchange.arrivals(), exchange.completions(), stream);
      };
    } else {
      return requires(Kernel& kernel, Exchange& exchange, Tokens const& tokens, Out out, Stream<Space> stream) {
        kernel.apply(tokens, out, exchange.completions(), stream);
      };
    }
  }
  using type = std::tuple<
      Verdict<rules::DispatchOverlaps, arrivals_meet(), Exchange, Kernel>,
      Verdict<rules::CombineOverlaps, completions_meet(), Exchange, Kernel>,
      Verdict<rules::KernelApplies, KernelApplies<Kernel, Tokens, Out, Stream<Space>>, Kernel, Tokens>, RouterVerdict,
      Verdict<rules::KernelRoutes, !facts::routes_inside<typename C::Experts>() || KernelRoutes<Kernel, Router>, Kernel, Router>>;
};

/// The first member that kernel, exchange or router lack. C: a legal Composition.
template <class C>
using BrokenPart = typename FirstBrokenOf<PartTemplates<C>, KernelDefinition<C>, KernelMembers<C>, OutputElement<C>, ExchangeDefinition<C>,
                                          ExchangeIncluded<C>, ExchangeMembers<C>, Meeting<C>>::type;

}  // namespace detail
}  // namespace moe
