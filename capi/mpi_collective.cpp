// SPDX-License-Identifier: Apache-2.0
// capi/mpi_collective.cpp: the layers of the host space over MPI's collectives.
#include "capi/mpi_layers.hpp"
#include "moe/backends/all_to_all_v.hpp"

using AllToAllV = moe::backends::AllToAllV<moe::comm::Mpi>;
using Int4Group32 = moe::quantization::WNa16<4, 32>;
using Int4Group64 = moe::quantization::WNa16<4, 64>;

MOE_C_MPI_LAYERS(AllToAllV, moe::quantization::None)
MOE_C_MPI_LAYERS(AllToAllV, moe::quantization::Fp8Block<>)
MOE_C_MPI_LAYERS(AllToAllV, moe::quantization::Fp8PerToken<>)
MOE_C_MPI_LAYERS(AllToAllV, Int4Group32)
MOE_C_MPI_LAYERS(AllToAllV, Int4Group64)
MOE_C_MPI_LAYERS(AllToAllV, moe::quantization::Int4Group128)
MOE_C_MPI_LAYERS(AllToAllV, moe::quantization::Mxfp4W4A16<>)
