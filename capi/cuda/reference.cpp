// SPDX-License-Identifier: Apache-2.0
// capi/cuda/reference.cpp: the layers of one GPU of any kind, with cuda_reference.
#include "capi/cuda/layers.hpp"

using Int4Group32 = moe::quantization::WNa16<4, 32>;
using Int4Group64 = moe::quantization::WNa16<4, 64>;

MOE_C_CUDA_LAYER(float, moe::experts::CudaReference, moe::quantization::None)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::CudaReference, moe::quantization::None)
MOE_C_CUDA_LAYER(moe::f16, moe::experts::CudaReference, moe::quantization::None)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::CudaReference, moe::quantization::Fp8Block<>)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::CudaReference, moe::quantization::Fp8PerToken<>)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::CudaReference, Int4Group32)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::CudaReference, Int4Group64)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::CudaReference, moe::quantization::Int4Group128)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::CudaReference, moe::quantization::Mxfp4W4A16<>)
MOE_C_CUDA_LAYER(moe::bf16, moe::experts::CudaReference, moe::quantization::Mxfp8<>)
