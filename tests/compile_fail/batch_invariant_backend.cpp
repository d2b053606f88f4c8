// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/batch_invariant_backend.cpp: a layer that must be batch-invariant over a backend that says it is not.
// expect: the layer must be batch-invariant, and the backend sums over ranks in an order that depends on the number of rows
// prints: Backend
#include "../archetypes.hpp"

struct Config : moe_test::Tiny {
  static constexpr bool batch_invariant = true;
};
struct Facts : moe_test::ExpertsFacts {
  static constexpr bool kBatchInvariant = true;
};
struct Backend : moe_test::ArchetypeBackend<> {
#ifdef MOE_FIXED
  static constexpr bool kBatchInvariant = true;
#else
  static constexpr bool kBatchInvariant = false;
#endif
};
using Layer =
    moe::ModularKernel<Config, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, Backend, moe_test::ArchetypeExperts<Facts>>;

static_assert(sizeof(Layer) > 0);
