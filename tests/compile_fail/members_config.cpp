// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/members_config.cpp: layer configurations, and their activations, that lack one member each.
// errors: each
// expect: int hidden' (H, or moe::dynamic), or it has another type. Fix: declare it as the contract says (docs/errors.md#policy-member)
// expect: the layer configuration lacks the member 'static constexpr int intermediate'
// expect: the layer configuration lacks the member 'static constexpr int num_experts'
// expect: the layer configuration lacks the member 'static constexpr int topk'
// expect: the layer configuration lacks the member 'using Act'
// expect: the layer configuration lacks the member 'using Weight'
// expect: the layer configuration lacks the member 'using Activation'
// expect: the policy lacks the member 'static constexpr char const* kName'
// expect: the activation lacks the member 'bool gated() const'
// expect: the activation lacks the member 'float operator()(float gate, float up) const'
#include "../archetypes.hpp"
#include "../without_member.hpp"

using namespace moe_test;
MOE_WITHOUT(NoHidden, Tiny, hidden);
MOE_WITHOUT(NoIntermediate, Tiny, intermediate);
MOE_WITHOUT(NoNumExperts, Tiny, num_experts);
MOE_WITHOUT(NoTopK, Tiny, topk);
MOE_WITHOUT_TYPE(NoAct, Tiny, Act);
MOE_WITHOUT_TYPE(NoWeight, Tiny, Weight);
MOE_WITHOUT_TYPE(NoActivation, Tiny, Activation);

template <class A>
struct With : Tiny {
  using Activation = A;
};
MOE_WITHOUT(NoName, ArchetypeActivation, kName);
MOE_WITHOUT(NoGated, ArchetypeActivation, gated);
MOE_WITHOUT(NoCall, ArchetypeActivation, operator());

template <class Config>
using ComposeConfig = Compose<ArchetypeRouter<>, ArchetypeQuantization<>, ArchetypeBackend<>, ArchetypeExperts<>, Config>;
static_assert(sizeof(ComposeConfig<NoHidden>) > 0);
static_assert(sizeof(ComposeConfig<NoIntermediate>) > 0);
static_assert(sizeof(ComposeConfig<NoNumExperts>) > 0);
static_assert(sizeof(ComposeConfig<NoTopK>) > 0);
static_assert(sizeof(ComposeConfig<NoAct>) > 0);
static_assert(sizeof(ComposeConfig<NoWeight>) > 0);
static_assert(sizeof(ComposeConfig<NoActivation>) > 0);
static_assert(sizeof(ComposeConfig<With<NoName>>) > 0);
static_assert(sizeof(ComposeConfig<With<NoGated>>) > 0);
static_assert(sizeof(ComposeConfig<With<NoCall>>) > 0);
