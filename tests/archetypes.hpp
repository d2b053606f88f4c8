// SPDX-License-Identifier: Apache-2.0
// tests/archetypes.hpp: the archetypes under the name of the tests, and policies that lack one member.
#pragma once

#include "moe/archetypes.hpp"

namespace moe_test {

using namespace moe;
using namespace moe::archetypes;

}  // namespace moe_test

// A policy like `base` without `member`: a deleted function hides it, whatever it is.
#define MOE_TEST_WITHOUT(name, base, member) \
  struct name : base {                       \
    using base::base;                        \
    void member() = delete;                  \
  }
