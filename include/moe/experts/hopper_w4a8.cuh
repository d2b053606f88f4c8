// SPDX-License-Identifier: Apache-2.0
// experts/hopper_w4a8.cuh: HopperW4A8 with its kernels, for a translation unit compiled for sm_90a that does not link the kernels from a
// library of moe_add_hopper_kernels.
#pragma once

#include "moe/experts/hopper/w4/a8/kernel.cuh"
#include "moe/experts/hopper/w4a8_layer.cuh"
#include "moe/experts/hopper_w4a8.hpp"
