// SPDX-License-Identifier: Apache-2.0
// capi/host_int4_fp8.cpp: the layers of one rank of the host space with int4 weights and e4m3 activations.
#include "capi/host_layers.hpp"

using Int4Group32Fp8 = moe::quantization::Int4Fp8<32>;
using Int4Group64Fp8 = moe::quantization::Int4Fp8<64>;
using Int4Group128Fp8 = moe::quantization::Int4Fp8<128>;
using Int4Group128ZeroFp8 = moe::quantization::Int4Fp8<128, true>;

MOE_C_HOST_LAYERS(float, Int4Group32Fp8)
MOE_C_HOST_LAYERS(moe::bf16, Int4Group32Fp8)
MOE_C_HOST_LAYERS(float, Int4Group64Fp8)
MOE_C_HOST_LAYERS(moe::bf16, Int4Group64Fp8)
MOE_C_HOST_LAYERS(float, Int4Group128Fp8)
MOE_C_HOST_LAYERS(moe::bf16, Int4Group128Fp8)
MOE_C_HOST_LAYERS(float, Int4Group128ZeroFp8)
MOE_C_HOST_LAYERS(moe::bf16, Int4Group128ZeroFp8)
