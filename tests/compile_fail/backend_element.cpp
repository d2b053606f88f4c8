// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/backend_element.cpp: rows of float32 over an exchange between device windows, which carries bf16.
// expect: the backend cannot carry rows of this element type
// prints: Backend
// prints: float | LayerDefaults::Act
#include "../archetypes.hpp"

struct Backend : moe_test::ArchetypeBackend<> {
  template <class Act>
  static constexpr bool carries_element() {
#ifdef MOE_FIXED
    return true;
#else
    return std::is_same_v<Act, moe::bf16>;
#endif
  }
};
using Layer = moe::ModularKernel<moe_test::Tiny, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, Backend,
                                 moe_test::ArchetypeExperts<>>;

static_assert(sizeof(Layer) > 0);
