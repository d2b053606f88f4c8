// SPDX-License-Identifier: Apache-2.0
// capi/mpi_layers.hpp: what mpi_*.cpp instantiate.
#pragma once

#include "capi/make_layer.hpp"
#include "moe/comm/mpi.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/quantization/schemes.hpp"

#define MOE_C_MPI_LAYERS(Backend, Quant)                                                                                                  \
  template std::unique_ptr<moe::c::Runner> moe_c::make_layer<float, Quant, Backend, moe::experts::OneDnn>(moe::c::Request const&, bool&); \
  template std::unique_ptr<moe::c::Runner> moe_c::make_layer<moe::bf16, Quant, Backend, moe::experts::OneDnn>(moe::c::Request const&,     \
                                                                                                              bool&);
