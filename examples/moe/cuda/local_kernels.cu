// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/local_kernels.cu: the kernels of the device oracle, and those that quantise and round rows on one rank.
#include "moe/backends/collective/no_expert_parallel.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_tensor.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/none.hpp"

using Wide = moe::models::RuntimeLayer<float, float>;
using Narrow = moe::models::RuntimeLayer<moe::bf16, moe::bf16>;
namespace quantization = moe::quantization;

template class moe::backends::detail::LocalExchange<moe::space::cuda, Wide, quantization::None, float>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::None, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Int4Group128, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Mxfp4W4A16<>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Fp8PerTensor<>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Fp8PerToken<>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Fp8Block<>, moe::bf16>;
template class moe::experts::CudaReference::Kernel<Wide, quantization::None, moe::ActivationFormat::standard>;
