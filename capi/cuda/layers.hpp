// SPDX-License-Identifier: Apache-2.0
// capi/cuda/layers.hpp: what cuda/*.cpp instantiate. The layer around the kernels is plain host C++; cuda/kernels/*.cu have the kernels.
#pragma once

#include "capi/make_layer.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/quantization/schemes.hpp"

#define MOE_C_CUDA_LAYER(Act, Experts, ...) \
  template std::unique_ptr<moe::c::Runner>  \
  moe_c::make_layer<Act, __VA_ARGS__, moe::backends::NoExpertParallel<moe::space::cuda>, Experts>(moe::c::Request const&, bool&);
