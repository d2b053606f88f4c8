// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_blocks_test.cu: the kernels that the blocks of hopper_blocks_test.cpp call, besides those of the Hopper experts.
#include "batched_exchange.cuh"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/fp8_per_tensor.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int8_per_channel.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"

using Layer = moe::models::RuntimeLayer<moe::bf16, moe::bf16>;
namespace quantization = moe::quantization;

template void moe::routing::RowRouter<moe::routing::RouterConfig>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Layer, quantization::None, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Layer, quantization::Fp8PerTensor<>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Layer, quantization::Fp8PerToken<>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Layer, quantization::Mxfp4W4A16<>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Layer, quantization::Int8PerChannel, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Layer, quantization::Int8PerChannel, float>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Layer, quantization::Mxfp4W4A16<>, float>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Layer, quantization::None, float>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Layer, quantization::Fp8PerTensor<>, float>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Layer, quantization::Fp8PerToken<>, float>;
template class moe_test::BatchedExchange<Layer, quantization::None, moe::bf16>;
template class moe::experts::CudaReference::Kernel<Layer, quantization::None, moe::ActivationFormat::standard>;
template class moe::experts::CudaReference::Kernel<Layer, quantization::Fp8PerTensor<>, moe::ActivationFormat::standard>;
template class moe::experts::CudaReference::Kernel<Layer, quantization::Fp8PerToken<>, moe::ActivationFormat::standard>;
template class moe::experts::CudaReference::Kernel<Layer, quantization::Mxfp4W4A16<>, moe::ActivationFormat::standard>;
template class moe::experts::CudaReference::Kernel<Layer, quantization::Int8PerChannel, moe::ActivationFormat::standard>;
