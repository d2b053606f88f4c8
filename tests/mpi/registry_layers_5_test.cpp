// SPDX-License-Identifier: Apache-2.0
// tests/mpi/registry_layers_5_test.cpp: the registry's further schemes with its sample of host backends.
#include "registry_layers.hpp"

namespace {
[[maybe_unused]] bool const registered =
    moe_test::register_compositions(moe::registry::further_quantizations, moe::registry::sample_backends, 64, __FILE__, __LINE__);
}
