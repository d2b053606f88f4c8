// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/immovable.cpp: a layer that is moved into a new place.
// expect: deleted
#include <utility>

#include "../archetypes.hpp"

using Layer = moe_test::Compose<>;

Layer* moved(Layer& layer) {
#ifdef MOE_FIXED
  return &layer;
#else
  return new Layer(std::move(layer));
#endif
}
