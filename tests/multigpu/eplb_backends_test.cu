// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/eplb_backends_test.cu: the kernels that the layers of eplb_backends_test.cpp call, besides those of the window exchanges.
// moe-ranks: 2 4
#include "device_backends.cuh"
