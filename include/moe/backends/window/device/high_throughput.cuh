// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput.cuh: HighThroughput with its kernels, for the translation units that instantiate layers.
#pragma once

#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/high_throughput/launch.cuh"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
