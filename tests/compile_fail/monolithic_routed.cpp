// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/monolithic_routed.cpp: routing of the caller for experts that route inside.
// expect: forward_routed(): the layer's experts route inside
// prints: ArchetypeExperts
#include "../archetypes.hpp"

struct Facts : moe_test::ExpertsFacts {
#ifndef MOE_FIXED
  static constexpr bool kRoutesInside = true;
#endif
};
using Layer = moe_test::Compose<moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, moe_test::ArchetypeBackend<>,
                                moe_test::ArchetypeExperts<Facts>>;

void call(Layer& layer, float* data, float const* read, std::int32_t const* ids) {
  layer.forward_routed(moe::make_rows<64>(read, 4, 64), moe::make_rows(ids, 4, 2), moe::make_rows(read, 4, 2),
                       moe::make_rows<64>(data, 4, 64));
}
