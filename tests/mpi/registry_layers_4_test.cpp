// SPDX-License-Identifier: Apache-2.0
// tests/mpi/registry_layers_4_test.cpp: the registry's host compositions with its schemes from 9 on.
#include "registry_layers.hpp"

namespace {
[[maybe_unused]] bool const registered =
    moe_test::register_compositions(moe_test::schemes<9, moe_test::kNumSchemes>(), 48, __FILE__, __LINE__);
}
