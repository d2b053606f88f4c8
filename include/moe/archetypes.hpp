// SPDX-License-Identifier: Apache-2.0
// archetypes.hpp: types to start a policy of your own from. archetypes/required.hpp: the smallest type that models each concept of
// core/contract/. archetypes/stated.hpp: the same with the optional members. A window of the host is in archetypes/window.hpp, which this
// header does not include; it includes the ModularKernel that they compose.
#pragma once

#include "moe/archetypes/required.hpp"
#include "moe/archetypes/stated.hpp"
#include "moe/modular_kernel.hpp"
