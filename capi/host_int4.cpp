// SPDX-License-Identifier: Apache-2.0
// capi/host_int4.cpp: the layers of one rank of the host space with int4 weights.
#include "capi/host_layers.hpp"

using Int4Group32 = moe::quantization::WNa16<4, 32>;
using Int4Group64 = moe::quantization::WNa16<4, 64>;
using Int4Group128 = moe::quantization::Int4Group128;
using Int4Group128Zero = moe::quantization::Int4Group128Zero;

MOE_C_HOST_LAYERS(float, Int4Group32)
MOE_C_HOST_LAYERS(moe::bf16, Int4Group32)
MOE_C_HOST_LAYERS(moe::f16, Int4Group32)
MOE_C_HOST_LAYERS(float, Int4Group64)
MOE_C_HOST_LAYERS(moe::bf16, Int4Group64)
MOE_C_HOST_LAYERS(moe::f16, Int4Group64)
MOE_C_HOST_LAYERS(float, Int4Group128)
MOE_C_HOST_LAYERS(moe::bf16, Int4Group128)
MOE_C_HOST_LAYERS(moe::f16, Int4Group128)
MOE_C_HOST_LAYERS(float, Int4Group128Zero)
MOE_C_HOST_LAYERS(moe::bf16, Int4Group128Zero)
