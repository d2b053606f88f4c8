// SPDX-License-Identifier: Apache-2.0
// capi/host_layers.hpp: what the host_*.cpp instantiate.
#pragma once

#include "capi/make_layer.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/quantization/schemes.hpp"

#define MOE_C_HOST_LAYERS(Act, ...)                                                                                                      \
  template std::unique_ptr<moe::c::Runner> moe_c::make_layer<Act, __VA_ARGS__, moe::backends::NoExpertParallel<>, moe::experts::OneDnn>( \
      moe::c::Request const&, bool&);
