// SPDX-License-Identifier: Apache-2.0
// backends/window/device/pplx.cuh: Pplx with its kernels, for the translation units that instantiate layers.
#pragma once

#include "moe/backends/window/device/pplx/exchange.hpp"
#include "moe/backends/window/device/pplx/launch.cuh"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
