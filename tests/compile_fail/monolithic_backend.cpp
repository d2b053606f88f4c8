// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/monolithic_backend.cpp: experts that route inside behind a backend that sends rows to the ranks of their experts.
// expect: the experts route inside, and the backend sends rows to the ranks of their experts, which are not known yet
// prints: ArchetypeExperts
// prints: Backend
#include "../archetypes.hpp"
#include "moe/parallel/backend_facts.hpp"

struct Facts : moe_test::ExpertsFacts {
  static constexpr bool kRoutesInside = true;
};
struct Backend : moe_test::ArchetypeBackend<> {
#ifdef MOE_FIXED
  static constexpr moe::BackendFacts kFacts{.name = kName, .transport = moe::Transport::gather};
#else
  static constexpr moe::BackendFacts kFacts{.name = kName};
#endif
};
using Layer = moe::ModularKernel<moe_test::Tiny, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, Backend,
                                 moe_test::ArchetypeExperts<Facts>>;

static_assert(sizeof(Layer) > 0);
