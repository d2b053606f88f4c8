// SPDX-License-Identifier: Apache-2.0
// capi/host_none.cpp: the layers of one rank of the host space without quantisation.
#include "capi/host_layers.hpp"

MOE_C_HOST_LAYERS(float, moe::quantization::None)
MOE_C_HOST_LAYERS(moe::bf16, moe::quantization::None)
MOE_C_HOST_LAYERS(moe::f16, moe::quantization::None)
