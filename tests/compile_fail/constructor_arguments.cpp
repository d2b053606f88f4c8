// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/constructor_arguments.cpp: a layer constructed from arguments in another order or of other types.
// errors: each
// expect: the constructor of a layer or runner takes (comm, weights, params), and the first argument is not a communicator of its backend.
// prints: ExpertWeights
// prints: comm::Self
// expect: the constructor of a layer or runner takes (comm, weights, params), and the first argument is not a communicator of its backend.
// prints: int
// prints: comm::Self
// expect: the constructor of a layer or runner takes (comm, weights, params), and the second argument is not a weight view of its types.
// prints: Store
// prints: ExpertWeights
// expect: the constructor of a layer or runner takes (comm, weights, params), and the second argument is not a weight view of its types.
// prints: ExpertWeights
// prints: ExpertWeights
#include "../archetypes.hpp"

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

void construct(Layer::Comm& comm, Store const& store, Layer::Params const& params,
               [[maybe_unused]] ExpertWeights<char, char> const& codes) {
  Layer const a(ARGUMENT(comm, store.view()), ARGUMENT(store.view(), comm), params);
  Layer const b(ARGUMENT(comm, 0), store.view(), params);
  Layer const c(comm, ARGUMENT(store.view(), store), {.max_tokens_per_rank = 8, .placement = ExpertPlacement(4, 1)});
  Layer const d(comm, ARGUMENT(store.view(), codes), params);
}
