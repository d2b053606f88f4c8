// SPDX-License-Identifier: Apache-2.0
// capi/host_fp8.cpp: the layers of one rank of the host space in fp8.
#include "capi/host_layers.hpp"

MOE_C_HOST_LAYERS(float, moe::quantization::Fp8Block<>)
MOE_C_HOST_LAYERS(moe::bf16, moe::quantization::Fp8Block<>)
MOE_C_HOST_LAYERS(moe::f16, moe::quantization::Fp8Block<>)
MOE_C_HOST_LAYERS(float, moe::quantization::Fp8PerToken<>)
MOE_C_HOST_LAYERS(moe::bf16, moe::quantization::Fp8PerToken<>)
MOE_C_HOST_LAYERS(moe::f16, moe::quantization::Fp8PerToken<>)
