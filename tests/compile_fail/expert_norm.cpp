// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/expert_norm.cpp: a model whose experts' outputs are normalised, with experts that do not declare kNormalisesOutput.
// expect: the model normalises each expert's output before the weighted sum, and the experts kernel sums without a norm
// prints: ArchetypeExperts
// prints: Config
#include "../archetypes.hpp"

struct Config : moe_test::Tiny {
  static constexpr moe::ExpertNorm expert_norm = moe::ExpertNorm::always;
};
struct Facts : moe_test::ExpertsFacts {
#ifdef MOE_FIXED
  static constexpr bool kNormalisesOutput = true;
#endif
};
using Layer = moe::ModularKernel<Config, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, moe_test::ArchetypeBackend<>,
                                 moe_test::ArchetypeExperts<Facts>>;

static_assert(sizeof(Layer) > 0);
