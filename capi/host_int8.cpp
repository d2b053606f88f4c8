// SPDX-License-Identifier: Apache-2.0
// capi/host_int8.cpp: the layers of one rank of the host space with int8 weights.
#include "capi/host_layers.hpp"

MOE_C_HOST_LAYERS(float, moe::quantization::Int8PerChannel)
MOE_C_HOST_LAYERS(moe::bf16, moe::quantization::Int8PerChannel)
MOE_C_HOST_LAYERS(float, moe::quantization::Int8PerToken)
MOE_C_HOST_LAYERS(moe::bf16, moe::quantization::Int8PerToken)
