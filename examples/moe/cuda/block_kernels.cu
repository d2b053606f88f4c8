// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/block_kernels.cu: compiles the kernels around a layer in a block on the device.
#include "examples/moe/cuda/block_kernels.cuh"
