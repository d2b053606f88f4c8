// SPDX-License-Identifier: Apache-2.0
// core/contract/backend.hpp: what a PrepareAndFinalize backend must have, and its exchange, which a layer owns.
#pragma once

#include <concepts>
#include <cstdint>
#include <tuple>

#include "moe/core/buffer.hpp"
#include "moe/core/contract/communicator.hpp"
#include "moe/core/contract/policy.hpp"
#include "moe/core/contract/window.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/rule.hpp"
#include "moe/core/tokens.hpp"
#include "moe/core/types.hpp"

namespace moe {

class ExpertPlacement;  // parallel/placement.hpp

// ---- The policy.

template <class B>
concept BackendHasComm = requires { typename B::Comm; };
MOE_MEMBER(BackendHasComm, "the backend", "using Comm", "the communicator that a layer is built over, with rank() and size()");
template <class B>
concept BackendCommHasRank = CommunicatorHasRank<typename B::Comm>;
template <class B>
concept BackendCommHasSize = CommunicatorHasSize<typename B::Comm>;

template <class B>
concept BackendHasFormat = requires {
  { B::kFormat } -> std::convertible_to<ActivationFormat>;
};
MOE_MEMBER(BackendHasFormat, "the backend", "static constexpr ActivationFormat kFormat", "how rows reach the experts");

template <class B>
concept BackendHasReduction = requires {
  { B::kReduction } -> std::convertible_to<TopKReduction>;
};
MOE_MEMBER(BackendHasReduction, "the backend", "static constexpr TopKReduction kReduction",
           "who applies the router weights and sums over the top-k");

template <class B, class Quant>
concept BackendHasCarries = requires {
  { B::template carries<Quant>() } -> std::same_as<bool>;
};
MOE_MEMBER(BackendHasCarries, "the backend", "template <class Quant> static constexpr bool carries()", "whether it can move this payload");

/// Moves tokens to the experts and results back. Partial: element of the rows that the experts write.
template <class B, class Config, class Quant, class Partial>
concept BackendHasExchange = requires { typename B::template Exchange<Config, Quant, Partial>; };
MOE_MEMBER(BackendHasExchange, "the backend", "template <class Config, class Quant, class Partial> class Exchange",
           "moves tokens to the experts and results back");

namespace detail {
/// Backend::Needs: what its exchange uses of its communicator or window, NeedsCommunicator or NeedsWindow. Default: rank() and size() of
/// Comm.
template <class B>
struct BackendNeeds {
  using type = std::tuple<>;
};
template <class B>
  requires requires { typename B::Needs; }
struct BackendNeeds<B> {
  using type = typename B::Needs;
};
template <class B>
using BackendContract =
    std::tuple<Verdict<rules::PolicyHasName, Named<B>, B>, Verdict<rules::PolicyHasSpace, HasSpace<B>, B>,
               Verdict<rules::PolicyHasParams, HasParams<B>, B>, Verdict<rules::BackendHasComm, BackendHasComm<B>, B>,
               Verdict<rules::CommunicatorHasRank, BackendCommHasRank<B>, B>, Verdict<rules::CommunicatorHasSize, BackendCommHasSize<B>, B>,
               Verdict<rules::BackendHasFormat, BackendHasFormat<B>, B>, Verdict<rules::BackendHasReduction, BackendHasReduction<B>, B>>;
template <class B, class Quant>
using BackendContractFor = std::tuple<Verdict<rules::BackendHasCarries, BackendHasCarries<B, Quant>, B>>;
}  // namespace detail

template <class B>
concept PrepareAndFinalize = detail::kAllHold<typename detail::BackendNeeds<B>::type> && detail::kAllHold<detail::BackendContract<B>>;

// ---- Its exchange: prepare() → the experts write expert_output() → finalize(), in this order, once per forward.

/// Collective: allocates from the arena for the layer's lifetime. The last arguments: T_max, the quantisation of the rows, the backend's
/// Params.
template <class X, class Backend, class Config, class Quant>
concept ExchangeIsBuilt = std::constructible_from<X, typename Backend::Comm&, Shape<Config> const&, std::int64_t, ExpertPlacement const&,
                                                  Quant const&, typename Backend::Params const&, Arena<typename Backend::Space>&>;
MOE_MEMBER(ExchangeIsBuilt, "the exchange",
           "Exchange(Comm&, Shape<Config> const&, int64_t max_tokens, ExpertPlacement const&, Quant const&, Params const&, Arena<Space>&)",
           "collective construction");

/// The most rows (standard), or rows per expert (batched), that the experts get.
template <class X>
concept ExchangeHasMaxRows = requires(X const& x) {
  { x.max_rows() } -> std::convertible_to<std::int64_t>;
};
MOE_MEMBER(ExchangeHasMaxRows, "the exchange", "int64_t max_rows() const", "most rows, or rows per expert, that the experts are given");

/// Collective: StandardTokens or BatchedTokens for this rank's experts.
template <class X, class Config>
concept ExchangePrepares = requires(X& x, RoutedTokens<typename Config::Act, Config::hidden> const& in, Stream<typename X::Space> stream) {
  x.prepare(in, stream);
};
MOE_MEMBER(ExchangePrepares, "the exchange", "prepare(RoutedTokens<Act, hidden> const&, Stream<Space>)",
           "with using Space; sends this rank's rows, returns the rows of its experts");

/// Where the experts write what finalize() reads. An exchange of one rank may also have expert_output(output), which may be the output.
template <class X>
concept ExchangeHasOutput = requires(X& x) { x.expert_output(); };
MOE_MEMBER(ExchangeHasOutput, "the exchange", "expert_output()", "where the experts write");

/// Collective: [M, H], every row written.
template <class X, class Config>
concept ExchangeFinalizes =
    requires(X& x, Rows<typename Config::Act, Config::hidden> out, Stream<typename X::Space> stream) { x.finalize(out, stream); };
MOE_MEMBER(ExchangeFinalizes, "the exchange", "finalize(Rows<Act, hidden> output, Stream<Space>)", "brings the results back");

/// Collective; replaces prepare() or finalize() if this rank's arguments were refused or its experts failed: peers get E_PEER.
template <class X>
concept ExchangeAbandons = requires(X& x, Stream<typename X::Space> stream) { x.abandon(stream); };
MOE_MEMBER(ExchangeAbandons, "the exchange", "abandon(Stream<Space>)", "ends a round that this rank cannot finish, peers get E_PEER");

namespace detail {
template <class X, class Backend, class Config, class Quant>
using ExchangeCalls =
    std::tuple<Verdict<rules::ExchangeIsBuilt, ExchangeIsBuilt<X, Backend, Config, Quant>, X>,
               Verdict<rules::ExchangeHasMaxRows, ExchangeHasMaxRows<X>, X>,
               Verdict<rules::ExchangePrepares, ExchangePrepares<X, Config>, X>, Verdict<rules::ExchangeHasOutput, ExchangeHasOutput<X>, X>,
               Verdict<rules::ExchangeFinalizes, ExchangeFinalizes<X, Config>, X>,
               Verdict<rules::ExchangeAbandons, ExchangeAbandons<X>, X>>;
}  // namespace detail

/// The calls of one round.
template <class X, class Config>
concept ExchangeOf =
    ExchangeHasMaxRows<X> && ExchangePrepares<X, Config> && ExchangeHasOutput<X> && ExchangeFinalizes<X, Config> && ExchangeAbandons<X>;

}  // namespace moe
