// SPDX-License-Identifier: Apache-2.0
// capi/mpi_windows.cpp: the layers of the host space over windows of the memory of a node.
#include "capi/mpi_layers.hpp"
#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/comm/mpi_shared.hpp"

using LowLatency = moe::backends::LowLatency<moe::comm::MpiShared>;
using HighThroughput = moe::backends::HighThroughput<moe::comm::MpiShared>;

MOE_C_MPI_LAYERS(LowLatency, moe::quantization::None)
MOE_C_MPI_LAYERS(HighThroughput, moe::quantization::None)
