// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/forward_routed_arguments.cpp: forward_routed() with one array of another element or rank in each call, and forward()
// of a layer whose router chooses nothing.
// errors: each
// expect: forward_routed(): topk_ids must be int32 or int64. Fix: convert the ids to one of them
// prints: short | int16_t
// prints: int
// expect: forward_routed(): topk_ids is not a view of rows
// prints: int
// prints: mdspan
// expect: forward_routed(): topk_weights must be float
// prints: double
// prints: float
// expect: forward_routed(): topk_weights is not a view of rows
// prints: mdspan
// prints: mdspan
// expect: forward(): output is a view of const elements
// prints: const float
// prints: float | LayerDefaults::Act
// expect: forward(): the layer's router chooses no experts. Fix: call forward_routed() with topk_ids and topk_weights
// prints: External
#include "../archetypes.hpp"
#include "moe/routing/external.hpp"

using namespace moe_test;
#ifdef MOE_FIXED
#define ARGUMENT(right, wrong) right
#else
#define ARGUMENT(right, wrong) wrong
#endif
using Routed = Compose<moe::routing::External>;

void call(Routed& layer, Compose<>& with_router, float* data, float const* read, std::int32_t const* numbers,
          [[maybe_unused]] std::int16_t const* narrow, [[maybe_unused]] double const* other) {
  auto const hidden = make_rows<64>(read, 4, 64);
  auto const ids = make_rows(numbers, 4, 2);
  auto const weights = make_rows(read, 4, 2);
  auto const output = make_rows<64>(data, 4, 64);
  layer.forward_routed(hidden, ARGUMENT(ids, make_rows(narrow, 4, 2)), weights, output);
  layer.forward_routed(hidden, ARGUMENT(ids, numbers), weights, output);
  with_router.forward_routed(hidden, ids, ARGUMENT(weights, make_rows(other, 4, 2)), output);
  layer.forward_routed(hidden, ids, ARGUMENT(weights, Vector<float const>(read, 4)), output);
  layer.forward_routed(hidden, ids, weights, ARGUMENT(output, make_rows<64>(read, 4, 64)));
  ARGUMENT(with_router, layer).forward(hidden, make_rows(read, 4, 4), output);
}
