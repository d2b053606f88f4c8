// SPDX-License-Identifier: Apache-2.0
// tests/mpi/registry_layers_3_test.cpp: the registry's host compositions with its schemes 6 to 8.
#include "registry_layers.hpp"

namespace {
[[maybe_unused]] bool const registered = moe_test::register_compositions(moe_test::schemes<6, 9>(), 24, __FILE__, __LINE__);
}
