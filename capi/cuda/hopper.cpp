// SPDX-License-Identifier: Apache-2.0
// capi/cuda/hopper.cpp: the layers of one GPU with the Hopper experts.
#include "capi/cuda/layers.hpp"

using Int4Group32 = moe::quantization::WNa16<4, 32>;
using Int4Group64 = moe::quantization::WNa16<4, 64>;
using Int4Group128ZeroFp8 = moe::quantization::Int4Fp8<128, true>;

MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperContiguous, moe::quantization::None)
MOE_C_CUDA_LAYER(moe::f16, moe::experts::HopperContiguous, moe::quantization::None)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperContiguous, moe::quantization::Fp8Block<>)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperContiguous, moe::quantization::Fp8PerToken<>)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW4A16, Int4Group32)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW4A16, Int4Group64)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW4A16, moe::quantization::Int4Group128)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW4A16, moe::quantization::Mxfp4W4A16<>)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW4A16, moe::quantization::Int4Group128Zero)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW4A16, moe::quantization::Nvfp4W4A16)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW4A8, moe::quantization::Mxfp4Fp8<>)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW4A8, moe::quantization::Int4Fp8<32>)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW4A8, moe::quantization::Int4Fp8<64>)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW4A8, moe::quantization::Int4Fp8<128>)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW4A8, Int4Group128ZeroFp8)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW8A16, moe::quantization::Int8PerChannel)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW8A16, moe::quantization::Fp8PerChannel<>)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW8A16, moe::quantization::Mxfp8W8A16<>)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperW8A16, moe::quantization::Mxfp8<>)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::HopperContiguous, moe::quantization::Int8PerToken)
