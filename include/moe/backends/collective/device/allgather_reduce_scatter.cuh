// SPDX-License-Identifier: Apache-2.0
// backends/collective/device/allgather_reduce_scatter.cuh: AllGatherReduceScatter in the CUDA space with its kernels, for the translation
// units that instantiate layers.
#pragma once

#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/collective/device/gather_exchange.cuh"
