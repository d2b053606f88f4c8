// SPDX-License-Identifier: Apache-2.0
// backends/collective/device/naive.cuh: Naive in the CUDA space with its kernels, for the translation units that instantiate layers.
#pragma once

#include "moe/backends/collective/device/gather_exchange.cuh"
#include "moe/backends/naive.hpp"
