// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/backend_output.cpp: experts that write float16 over an exchange between device windows, which takes bf16 and float32.
// expect: the backend cannot bring back expert outputs of this element type
// prints: Backend
// prints: half | f16
#include "../archetypes.hpp"

struct Backend : moe_test::ArchetypeBackend<> {
  template <class Output>
  static constexpr bool returns_element() {
    return std::is_same_v<Output, moe::bf16> || std::is_same_v<Output, float>;
  }
};
template <class Kernel>
class HalfOutput : public Kernel {
 public:
  using Kernel::Kernel;
#ifndef MOE_FIXED
  using Output = moe::f16;
#endif
};
using Layer = moe::ModularKernel<moe_test::Tiny, moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, Backend,
                                 moe_test::WithKernel<HalfOutput>>;

static_assert(sizeof(Layer) > 0);
