// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/members_router.cpp: routers that lack one member each.
// errors: each
// expect: the policy lacks the member 'static constexpr char const* kName'
// expect: the router lacks the member 'static constexpr bool kWeightOnInput'
// expect: the router lacks the member 'explicit Router(Params const&)'
// expect: the router lacks the member 'int num_experts() const'
// expect: the router lacks the member 'int topk() const'
// expect: the router lacks the member 'int num_logits() const'
// expect: the router lacks the member 'int num_slots() const'
// expect: the router lacks the member 'template <class L> void select(routing::RouteArgs<L> const&) const'
// expect: the router lacks the member 'template <class L> void select(routing::RouteArgs<L> const&, cudaStream_t) const'
#include "../archetypes.hpp"
//
#include "../without_member.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/backends/no_expert_parallel.hpp"

using namespace moe_test;
using Complete = ArchetypeRouter<>;
MOE_WITHOUT(NoName, Complete, kName);
MOE_WITHOUT(NoWeightOnInput, Complete, kWeightOnInput);
MOE_WITHOUT_TYPE(NoParams, Complete, Params);
MOE_WITHOUT(NoNumExperts, Complete, num_experts);
MOE_WITHOUT(NoTopK, Complete, topk);
MOE_WITHOUT(NoNumLogits, Complete, num_logits);
MOE_WITHOUT(NoNumSlots, Complete, num_slots);
MOE_WITHOUT(NoSelect, Complete, select);
struct NoDeviceSelect : Complete {
  using Complete::Complete;
#ifdef MOE_FIXED
  using Complete::select;
  template <class L>
  void select(moe::routing::RouteArgs<L> const&, moe::Stream<moe::space::cuda>) const {}
#endif
};
struct OnDevice : ExpertsFacts {
  static constexpr bool kOnDevice = true;
};

static_assert(sizeof(Compose<NoName>) > 0);
static_assert(sizeof(Compose<NoWeightOnInput>) > 0);
static_assert(sizeof(Compose<NoParams>) > 0);
static_assert(sizeof(Compose<NoNumExperts>) > 0);
static_assert(sizeof(Compose<NoTopK>) > 0);
static_assert(sizeof(Compose<NoNumLogits>) > 0);
static_assert(sizeof(Compose<NoNumSlots>) > 0);
static_assert(sizeof(Compose<NoSelect>) > 0);
static_assert(sizeof(Compose<NoDeviceSelect, ArchetypeQuantization<>, moe::backends::NoExpertParallel<moe::space::cuda>,
                             ArchetypeExperts<OnDevice>>) > 0);
