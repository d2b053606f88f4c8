// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/weight_on_input.cpp: Llama-4 routing with top 2 over a batched backend.
// expect: the router weight is applied on the input, which a batched backend can do only with topk = 1
// prints: ArchetypeRouter
// prints: Value<2>
// prints: Value<1>
#include "../archetypes.hpp"

struct Batched : moe_test::ExpertsFacts {
  static constexpr auto kReads = moe::ActivationFormat::batched;
};
struct Config : moe_test::Tiny {
#ifdef MOE_FIXED
  static constexpr int topk = 1;
#endif
};
using Backend = moe_test::ArchetypeBackend<moe::ActivationFormat::batched>;
using Layer = moe::ModularKernel<Config, moe_test::ArchetypeRouter<true>, moe_test::ArchetypeQuantization<>, Backend,
                                 moe_test::ArchetypeExperts<Batched>>;

static_assert(sizeof(Layer) > 0);
