// SPDX-License-Identifier: Apache-2.0
// capi/host_mxfp4.cpp: the layers of one rank of the host space with mxfp4 weights.
#include "capi/host_layers.hpp"

MOE_C_HOST_LAYERS(float, moe::quantization::Mxfp4W4A16<>)
MOE_C_HOST_LAYERS(moe::bf16, moe::quantization::Mxfp4W4A16<>)
MOE_C_HOST_LAYERS(moe::f16, moe::quantization::Mxfp4W4A16<>)
