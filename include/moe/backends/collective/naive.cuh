// SPDX-License-Identifier: Apache-2.0
// backends/collective/naive.cuh: Naive in the CUDA space with its kernels, for the translation units that instantiate layers.
#pragma once

#include "moe/backends/collective/gather_exchange.cuh"
#include "moe/backends/naive.hpp"
