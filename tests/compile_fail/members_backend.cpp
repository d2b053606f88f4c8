// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/members_backend.cpp: backends, and their exchanges, that lack one member each.
// errors: each
// expect: the policy lacks the member 'static constexpr char const* kName'
// expect: the policy lacks the member 'using Space'
// expect: the policy lacks the member 'struct Params'
// expect: the backend lacks the member 'using Comm'
// expect: the backend lacks the member 'static constexpr ActivationFormat kFormat'
// expect: the backend lacks the member 'static constexpr TopKReduction kReduction'
// expect: the backend lacks the member 'template <class Quant> static constexpr bool carries()'
// expect: the backend lacks the member 'template <class Config, class Quant, class Partial> class Exchange'
// expect: the exchange lacks the member 'Exchange(Comm&, Shape<Config> const&, int64_t max_tokens, ExpertPlacement const&,
// expect: the exchange lacks the member 'int64_t max_rows() const'
// expect: the exchange lacks the member 'prepare(RoutedTokens<Act, hidden> const&, Stream<Space>)'
// expect: the exchange lacks the member 'expert_output()'
// expect: the exchange lacks the member 'finalize(Rows<Act, hidden> output, Stream<Space>)'
// expect: the exchange lacks the member 'abandon(Stream<Space>)'
#include "../archetypes.hpp"
#include "../without_member.hpp"

using namespace moe_test;
using Complete = ArchetypeBackend<>;
MOE_WITHOUT(NoName, Complete, kName);
MOE_WITHOUT_TYPE(NoSpace, Complete, Space);
MOE_WITHOUT_TYPE(NoParams, Complete, Params);
MOE_WITHOUT_TYPE(NoComm, Complete, Comm);
MOE_WITHOUT(NoFormat, Complete, kFormat);
MOE_WITHOUT(NoReduction, Complete, kReduction);
MOE_WITHOUT(NoCarries, Complete, carries);
MOE_WITHOUT_TYPE(NoExchange, Complete, Exchange);

template <class Exchange>
class NotBuilt : public Exchange {
 public:
#ifdef MOE_FIXED
  using Exchange::Exchange;
#endif
};
template <class X>
MOE_WITHOUT(NoMaxRows, X, max_rows);
template <class X>
MOE_WITHOUT(NoPrepare, X, prepare);
template <class X>
MOE_WITHOUT(NoOutput, X, expert_output);
template <class X>
MOE_WITHOUT(NoFinalize, X, finalize);
template <class X>
MOE_WITHOUT(NoAbandon, X, abandon);

template <class B>
using ComposeBackend = Compose<ArchetypeRouter<>, ArchetypeQuantization<>, B>;
static_assert(sizeof(ComposeBackend<NoName>) > 0);
static_assert(sizeof(ComposeBackend<NoSpace>) > 0);
static_assert(sizeof(ComposeBackend<NoParams>) > 0);
static_assert(sizeof(ComposeBackend<NoComm>) > 0);
static_assert(sizeof(ComposeBackend<NoFormat>) > 0);
static_assert(sizeof(ComposeBackend<NoReduction>) > 0);
static_assert(sizeof(ComposeBackend<NoCarries>) > 0);
static_assert(sizeof(ComposeBackend<NoExchange>) > 0);
static_assert(sizeof(ComposeBackend<WithExchange<NotBuilt>>) > 0);
static_assert(sizeof(ComposeBackend<WithExchange<NoMaxRows>>) > 0);
static_assert(sizeof(ComposeBackend<WithExchange<NoPrepare>>) > 0);
static_assert(sizeof(ComposeBackend<WithExchange<NoOutput>>) > 0);
static_assert(sizeof(ComposeBackend<WithExchange<NoFinalize>>) > 0);
static_assert(sizeof(ComposeBackend<WithExchange<NoAbandon>>) > 0);
