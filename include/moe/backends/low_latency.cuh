// SPDX-License-Identifier: Apache-2.0
// backends/low_latency.cuh: LowLatency with its kernels, for the translation units that instantiate layers.
#pragma once

#include "moe/backends/low_latency_cuda.hpp"
#include "moe/backends/low_latency_launch.cuh"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
