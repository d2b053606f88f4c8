// SPDX-License-Identifier: Apache-2.0
// tests/mpi/registry_layers_1_test.cpp: the registry's host compositions with its schemes 0 to 2.
#include "registry_layers.hpp"

namespace {
[[maybe_unused]] bool const registered = moe_test::register_compositions(moe_test::schemes<0, 3>(), 24, __FILE__, __LINE__);
}
