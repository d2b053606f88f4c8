// SPDX-License-Identifier: Apache-2.0
// experts/hopper_contiguous.cuh: HopperContiguous with its kernels, for a translation unit compiled for sm_90a that does not link the
// kernels from a library of moe_add_hopper_kernels.
#pragma once

#include "moe/experts/hopper/contiguous_layer.cuh"
#include "moe/experts/hopper/layer/launch.cuh"
#include "moe/experts/hopper/layer/launch_columns.cuh"
#include "moe/experts/hopper_contiguous.hpp"
