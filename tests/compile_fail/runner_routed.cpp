// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/runner_routed.cpp: routing of the caller for a runner whose experts route inside, and ids of a wrong type.
// errors: each
// expect: forward_routed(): the layer's experts route inside
// prints: ModularKernel | Layer
// expect: forward_routed(): topk_ids must be int32 or int64
// prints: short | Id
// prints: int
#include "../archetypes.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"

using namespace moe_test;
struct Facts : ExpertsFacts {
#ifndef MOE_FIXED
  static constexpr bool kRoutesInside = true;
#endif
};
using Layer = Compose<ArchetypeRouter<>, ArchetypeQuantization<>, ArchetypeBackend<>, ArchetypeExperts<Facts>>;
#ifdef MOE_FIXED
using Id = std::int32_t;
#else
using Id = std::int16_t;
#endif

void call(Runner<Layer>& inside, Runner<Compose<>>& outside, float* data, float const* read, std::int32_t const* ids, Id const* other) {
  auto const hidden = make_rows(read, 4, 64);
  auto const weights = make_rows(read, 4, 2);
  auto const output = make_rows(data, 4, 64);
  inside.forward_routed(hidden, make_rows(ids, 4, 2), weights, output);
  outside.forward_routed(hidden, make_rows(other, 4, 2), weights, output);
}
