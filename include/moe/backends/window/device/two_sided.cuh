// SPDX-License-Identifier: Apache-2.0
// backends/window/device/two_sided.cuh: TwoSided with its kernels, for the translation units that instantiate layers.
#pragma once

#include "moe/backends/window/device/two_sided/exchange.hpp"
#include "moe/backends/window/device/two_sided/launch.cuh"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
