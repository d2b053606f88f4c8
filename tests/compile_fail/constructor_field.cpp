// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/constructor_field.cpp: a field of the router's parameters that does not exist, in the braces of a constructor's
// argument: no compiler names the field, and the constructor's line that they print says how to have it named.
// errors: any
// expect: ModularKernel<
// shows: Fix: if no constructor takes the braces, Layer::Params const p{...}; names the field
// shows: Fix: if no constructor takes the braces, Runner::Params const p{...}; names the field
#include "../archetypes.hpp"
#include "moe/runner/runner.hpp"

using namespace moe_test;
#ifdef MOE_FIXED
#define FIELD(right, wrong) right
#else
#define FIELD(right, wrong) wrong
#endif

void construct(Compose<>::Comm& comm, Compose<>::Weights const& weights) {
  Compose<> const layer(comm, weights, {.max_tokens_per_rank = 8, .placement = ExpertPlacement(4, 1), .router = {.FIELD(topk, tpk) = 2}});
  moe::Runner<Compose<>> const runner(
      comm, weights, {.layer = {.max_tokens_per_rank = 8, .placement = ExpertPlacement(4, 1), .router = {.FIELD(topk, tpk) = 2}}});
}
