// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/runner_constructor_arguments.cpp: a runner constructed from arguments in another order or of other types.
// errors: each
// expect: the constructor of a layer or runner takes (comm, weights, params), and the first argument is not a communicator of its backend.
// prints: ExpertWeights
// prints: comm::Self
// expect: the constructor of a layer or runner takes (comm, weights, params), and the second argument is not a weight view of its types.
// prints: Store
// prints: ExpertWeights
#include "../archetypes.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"

using namespace moe_test;
using Layer = Compose<>;
struct Store {
  Layer::Weights view() const { return {}; }
};
#ifdef MOE_FIXED
#define ARGUMENT(right, wrong) right
#else
#define ARGUMENT(right, wrong) wrong
#endif

void construct(Layer::Comm& comm, Store const& store, Runner<Layer>::Params const& params) {
  Runner<Layer> const a(ARGUMENT(comm, store.view()), ARGUMENT(store.view(), comm), params);
  Runner<Layer> const b(comm, ARGUMENT(store.view(), store), params);
}
