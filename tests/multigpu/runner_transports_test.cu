// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_transports_test.cu: the kernels that the runners of runner_transports_test.cpp call.
// moe-ranks: 2 4
#include "counting_nccl.hpp"
#include "moe/backends/collective/device/allgather_reduce_scatter.cuh"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/core/contract/monolithic.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/monolithic.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int8_per_token.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/runner/device/linear.cuh"
#include "moe/runner/device/row_kernels.cuh"

using moe::bf16;
using moe::LogitsRows;
using moe_test::CountingNccl;
using Cuda = moe::space::cuda;
using Layer = moe::models::RuntimeLayer<bf16, bf16>;
using Gather = moe::backends::AllGatherReduceScatter<CountingNccl>;
using None = moe::quantization::None;
using PerToken = moe::quantization::Fp8PerToken<>;
using PerBlock = moe::quantization::Fp8Block<>;
using Int8 = moe::quantization::Int8PerToken;
using moe::ActivationFormat;

template void moe::routing::RowRouter<moe::routing::RouterConfig>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template void moe::routing::pass_logits<float>(RouteArgs<float> const&, Stream<space::cuda>);
template class moe::detail::DeviceRounds<CountingNccl>;
template class moe::backends::detail::LocalExchange<Cuda, Layer, None, float>;
template class moe::backends::detail::LocalExchange<Cuda, Layer, PerToken, float>;
template class moe::backends::detail::LocalExchange<Cuda, Layer, PerBlock, float>;
template class moe::backends::detail::LocalExchange<Cuda, Layer, Int8, float>;
template class moe::detail::GatherExchange<Gather, Layer, None, float>;
template class moe::detail::GatherExchange<Gather, Layer, PerToken, float>;
template class moe::detail::GatherExchange<Gather, Layer, PerBlock, float>;
template class moe::detail::GatherExchange<Gather, Layer, Int8, float>;
template class moe::detail::GatherExchange<Gather, LogitsRows<Layer>, PerToken, float>;
template class moe::experts::CudaReference::Kernel<Layer, None, ActivationFormat::standard>;
template class moe::experts::CudaReference::Kernel<Layer, PerToken, ActivationFormat::standard>;
template class moe::experts::CudaReference::Kernel<Layer, PerBlock, ActivationFormat::standard>;
template class moe::experts::CudaReference::Kernel<Layer, Int8, ActivationFormat::standard>;
template class moe::runner::Linear<Cuda, float, bf16, float>;
template void moe::runner::RowKernels<Cuda>::copy_columns(moe::Rows<bf16 const>, moe::Rows<bf16>, cudaStream_t);
