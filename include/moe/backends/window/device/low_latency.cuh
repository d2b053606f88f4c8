// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency.cuh: LowLatency with its kernels, for the translation units that instantiate layers.
#pragma once

#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/backends/window/device/low_latency/launch.cuh"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
