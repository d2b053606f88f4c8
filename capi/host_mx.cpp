// SPDX-License-Identifier: Apache-2.0
// capi/host_mx.cpp: the layers of one rank of the host space in mxfp8 and with nvfp4 weights, and with mxfp4 weights and e4m3 activations.
#include "capi/host_layers.hpp"

MOE_C_HOST_LAYERS(float, moe::quantization::Mxfp8<>)
MOE_C_HOST_LAYERS(moe::bf16, moe::quantization::Mxfp8<>)
MOE_C_HOST_LAYERS(float, moe::quantization::Mxfp4Fp8<>)
MOE_C_HOST_LAYERS(moe::bf16, moe::quantization::Mxfp4Fp8<>)
MOE_C_HOST_LAYERS(float, moe::quantization::Nvfp4W4A16)
MOE_C_HOST_LAYERS(moe::bf16, moe::quantization::Nvfp4W4A16)
