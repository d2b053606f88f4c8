// SPDX-License-Identifier: Apache-2.0
// tests/mpi/registry_layers_2_test.cpp: the registry's host compositions with its schemes 3 to 5.
#include "registry_layers.hpp"

namespace {
[[maybe_unused]] bool const registered = moe_test::register_compositions(moe_test::schemes<3, 6>(), 24, __FILE__, __LINE__);
}
