// SPDX-License-Identifier: Apache-2.0
// backends/window/device/one_sided.cuh: OneSided with its kernels, for the translation units that instantiate layers.
#pragma once

#include "moe/backends/window/device/one_sided/exchange.hpp"
#include "moe/backends/window/device/one_sided/launch.cuh"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
