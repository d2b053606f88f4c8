// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/dual_batch.cpp: a dual batch over a backend that cannot send and wait apart.
// expect: dual batch over a backend that cannot send and wait apart
// prints: Backend
#include "../archetypes.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"

using namespace moe_test;
struct Backend : ArchetypeBackend<> {
#ifdef MOE_FIXED
  static constexpr BackendFacts kFacts{.name = kName, .asynchronous = true};
#endif
};
struct Parts : RunnerDefaults {
  using DualBatch = runner::dual_batch::Halves;
};
using Layer = Compose<ArchetypeRouter<>, ArchetypeQuantization<>, Backend>;

void build(Layer::Comm& comm, Layer::Weights const& weights, Runner<Layer, Parts>::Params const& p) {
  Runner<Layer, Parts> const runner(comm, weights, p);
}
