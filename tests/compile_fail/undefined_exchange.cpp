// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/undefined_exchange.cpp: a backend of a user whose exchange is declared only.
// expect: the backend's exchange is declared and not defined. Fix: include the header that defines it before the layer is named
// prints: Backend::Exchange<
#include "../archetypes.hpp"

struct Backend : moe_test::ArchetypeBackend<> {
#ifndef MOE_FIXED
  template <class Config, class Quant, class Partial>
  class Exchange;
#endif
};

static_assert(sizeof(moe_test::Compose<moe_test::ArchetypeRouter<>, moe_test::ArchetypeQuantization<>, Backend>) > 0);
