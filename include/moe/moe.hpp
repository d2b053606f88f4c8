// SPDX-License-Identifier: Apache-2.0
// moe.hpp: everything that a host program needs to compose and run a layer on one rank; experts::OneDnn comes along where its header is.
// What needs a library or a compiler of its own does not: MPI (comm/mpi.hpp, comm/mpi_shared.hpp), backends over windows of the host
// (backends/window/host/<name>.hpp), the CUDA space (backends/window/device/, backends/collective/device/, experts/*.cuh).
#pragma once

#include "moe/activation/activation.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/naive.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/comm/self.hpp"
#include "moe/experts/monolithic.hpp"
#include "moe/experts/reference.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/parallel/placement.hpp"
#include "moe/quantization/schemes.hpp"
#include "moe/routing/routers.hpp"
#if __has_include(<dnnl.h>)
#include "moe/experts/onednn.hpp"
#endif
