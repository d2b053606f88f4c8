// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/members_config.cpp: layer configurations that lack one member each.
// errors: each
// expect: int hidden' (H, or moe::dynamic), or it has another type. Fix: declare it as the contract says (docs/errors.md#policy-member)
// expect: the layer configuration lacks the member 'static constexpr int intermediate'
// expect: the layer configuration lacks the member 'static constexpr int num_experts'
// expect: the layer configuration lacks the member 'static constexpr int topk'
// expect: the layer configuration lacks the member 'using Act'
// expect: the layer configuration lacks the member 'using Weight'
// expect: the layer configuration lacks the member 'using Activation'
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

template <class Config>
using ComposeConfig = Compose<ArchetypeRouter<>, ArchetypeQuantization<>, ArchetypeBackend<>, ArchetypeExperts<>, Config>;
static_assert(sizeof(ComposeConfig<NoHidden>) > 0);
static_assert(sizeof(ComposeConfig<NoIntermediate>) > 0);
static_assert(sizeof(ComposeConfig<NoNumExperts>) > 0);
static_assert(sizeof(ComposeConfig<NoTopK>) > 0);
static_assert(sizeof(ComposeConfig<NoAct>) > 0);
static_assert(sizeof(ComposeConfig<NoWeight>) > 0);
static_assert(sizeof(ComposeConfig<NoActivation>) > 0);
