// SPDX-License-Identifier: Apache-2.0
// backends/high_throughput.cuh: HighThroughput with its kernels, for the translation units that instantiate layers.
#pragma once

#include "moe/backends/high_throughput_cuda.hpp"
#include "moe/backends/high_throughput_launch.cuh"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
