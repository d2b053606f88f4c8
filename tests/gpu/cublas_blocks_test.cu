// SPDX-License-Identifier: Apache-2.0
// tests/gpu/cublas_blocks_test.cu: the kernels that the blocks of cublas_blocks_test.cpp call.
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/experts/cublas_grouped.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"

using Wide = moe::models::RuntimeLayer<float, float>;
using Narrow = moe::models::RuntimeLayer<moe::bf16, moe::bf16>;
using moe::quantization::None;

template void moe::routing::RowRouter<moe::routing::RouterConfig>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Wide, None, float>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, None, moe::bf16>;
template class moe::experts::CublasGrouped::Kernel<Wide, None, moe::ActivationFormat::standard>;
template class moe::experts::CublasGrouped::Kernel<Narrow, None, moe::ActivationFormat::standard>;
