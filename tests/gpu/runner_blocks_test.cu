// SPDX-License-Identifier: Apache-2.0
// tests/gpu/runner_blocks_test.cu: the kernels that the blocks of runner_blocks_test.cpp call. Those around their layers are the tool's
// (examples/moe/cuda/block_kernels.cuh).
#include "examples/moe/cuda/block_kernels.cuh"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"

using Wide = moe::models::RuntimeLayer<float, float>;
using Narrow = moe::models::RuntimeLayer<moe::bf16, moe::bf16>;
using moe::bf16;
using moe::quantization::None;
using Cuda = moe::space::cuda;

template void moe::routing::RowRouter<moe::routing::RouterConfig>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template class moe::backends::detail::LocalExchange<Cuda, Wide, None, float>;
template class moe::backends::detail::LocalExchange<Cuda, Narrow, None, bf16>;
template class moe::backends::detail::LocalExchange<Cuda, Narrow, None, float>;
template class moe::experts::CudaReference::Kernel<Wide, None, moe::ActivationFormat::standard>;
template class moe::experts::CudaReference::Kernel<Narrow, None, moe::ActivationFormat::standard>;
