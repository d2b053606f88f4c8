// SPDX-License-Identifier: Apache-2.0
// capi/host_mx.cpp: the layers of one rank of the host space in mxfp8, with fp8, mxfp8 or nvfp4 weights alone, and with mxfp4 weights and
// e4m3 activations.
#include "capi/host_layers.hpp"

MOE_C_HOST_LAYERS(float, moe::quantization::Mxfp8<>)
MOE_C_HOST_LAYERS(moe::bf16, moe::quantization::Mxfp8<>)
MOE_C_HOST_LAYERS(float, moe::quantization::Mxfp4Fp8<>)
MOE_C_HOST_LAYERS(moe::bf16, moe::quantization::Mxfp4Fp8<>)
MOE_C_HOST_LAYERS(float, moe::quantization::Nvfp4W4A16)
MOE_C_HOST_LAYERS(moe::bf16, moe::quantization::Nvfp4W4A16)
MOE_C_HOST_LAYERS(float, moe::quantization::Mxfp8W8A16<>)
MOE_C_HOST_LAYERS(moe::bf16, moe::quantization::Mxfp8W8A16<>)
MOE_C_HOST_LAYERS(float, moe::quantization::Fp8PerChannel<>)
MOE_C_HOST_LAYERS(moe::bf16, moe::quantization::Fp8PerChannel<>)
