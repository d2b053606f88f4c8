// SPDX-License-Identifier: Apache-2.0
// experts/hopper_w8a16.cuh: HopperW8A16 with its kernels, for a translation unit compiled for sm_90a that does not link the kernels from a
// library of moe_add_hopper_kernels.
#pragma once

#include "moe/experts/hopper/w4/launch.cuh"
#include "moe/experts/hopper/w4a16_layer.cuh"
#include "moe/experts/hopper_w8a16.hpp"
