// SPDX-License-Identifier: Apache-2.0
// capi/cuda/kernels/reference.cu: the kernels of cuda_reference in layers with run-time dimensions.
#include "moe/experts/cuda_reference.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/mxfp8.hpp"
#include "moe/quantization/none.hpp"

using Wide = moe::models::RuntimeLayer<float, float>;
using Narrow = moe::models::RuntimeLayer<moe::bf16, moe::bf16>;
using Half = moe::models::RuntimeLayer<moe::f16, moe::f16>;
namespace quantization = moe::quantization;
using moe::ActivationFormat;
using moe::experts::CudaReference;

template class CudaReference::Kernel<Wide, quantization::None, ActivationFormat::standard>;
template class CudaReference::Kernel<Narrow, quantization::None, ActivationFormat::standard>;
template class CudaReference::Kernel<Half, quantization::None, ActivationFormat::standard>;
template class CudaReference::Kernel<Narrow, quantization::Fp8Block<>, ActivationFormat::standard>;
template class CudaReference::Kernel<Narrow, quantization::Fp8PerToken<>, ActivationFormat::standard>;
template class CudaReference::Kernel<Narrow, quantization::WNa16<4, 32>, ActivationFormat::standard>;
template class CudaReference::Kernel<Narrow, quantization::WNa16<4, 64>, ActivationFormat::standard>;
template class CudaReference::Kernel<Narrow, quantization::Int4Group128, ActivationFormat::standard>;
template class CudaReference::Kernel<Narrow, quantization::Mxfp4W4A16<>, ActivationFormat::standard>;
template class CudaReference::Kernel<Narrow, quantization::Mxfp8<>, ActivationFormat::standard>;
