// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_killed_rank_test.cu: the kernels that the runners of runner_killed_rank_test.cpp call.
#include "runner_grid_kernels.cuh"
