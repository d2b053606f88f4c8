// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_grid_windows_test.cu: the kernels that runner_grid_windows_test.cpp calls, besides those of the window exchanges.
// moe-ranks: 2 4
#include "runner_grid_kernels.cuh"
