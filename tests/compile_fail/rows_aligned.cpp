// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/rows_aligned.cpp: rows of 60 bf16 values are not a multiple of 16 bytes, which matters on the device.
// expect: a row of hidden states is not a multiple of 16 bytes
// prints: Value<60>
// prints: MultipleOf<8>
// prints: __nv_bfloat16 | Config::Act
#include "../archetypes.hpp"

struct Device : moe_test::ExpertsFacts {
  static constexpr bool kOnDevice = true;
};
struct DeviceBackend : moe_test::ArchetypeBackend<> {
  using Space = moe::space::cuda;
};
struct Config : moe_test::Tiny {
  using Act = moe::bf16;
#ifndef MOE_FIXED
  static constexpr int hidden = 60;
#endif
};
// The archetypes have no device code: the rules are asked without the layer.
using Composed = moe::Composition<Config, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, DeviceBackend,
                                  moe_test::ArchetypeExperts<Device>>;

static_assert(sizeof(Composed::Error) > 0);
