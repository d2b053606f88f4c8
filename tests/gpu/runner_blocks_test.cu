// SPDX-License-Identifier: Apache-2.0
// tests/gpu/runner_blocks_test.cu: the kernels that the blocks of runner_blocks_test.cpp call.
#include "moe/backends/collective/no_expert_parallel.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/row_kernels.cuh"

using Wide = moe::models::RuntimeLayer<float, float>;
using Narrow = moe::models::RuntimeLayer<moe::bf16, moe::bf16>;
using moe::bf16;
using moe::Rows;
using moe::quantization::None;
using moe::runner::FinishRows;
using Cuda = moe::space::cuda;
using Kernels = moe::runner::RowKernels<Cuda>;

template void moe::routing::RowRouter<moe::routing::RouterConfig>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template class moe::backends::detail::LocalExchange<Cuda, Wide, None, float>;
template class moe::backends::detail::LocalExchange<Cuda, Narrow, None, bf16>;
template class moe::backends::detail::LocalExchange<Cuda, Narrow, None, float>;
template class moe::experts::CudaReference::Kernel<Wide, None, moe::ActivationFormat::standard>;
template class moe::experts::CudaReference::Kernel<Narrow, None, moe::ActivationFormat::standard>;

template class moe::runner::Linear<Cuda, float, float, float>;
template class moe::runner::Linear<Cuda, float, bf16, float>;
template class moe::runner::Linear<Cuda, bf16, bf16, bf16>;
template class moe::runner::device::DenseShared<float>;
template class moe::runner::device::DenseShared<bf16>;

template void Kernels::gelu(Rows<float>, cudaStream_t);
template void Kernels::rms_norm(Rows<float const>, float const*, float, float, Rows<float>, cudaStream_t);
template void Kernels::rms_norm(Rows<bf16 const>, float const*, float, float, Rows<float>, cudaStream_t);
template void Kernels::rms_norm(Rows<bf16 const>, float const*, float, float, Rows<bf16>, cudaStream_t);
template void Kernels::copy_columns(Rows<float const>, Rows<float>, cudaStream_t);
template void Kernels::copy_columns(Rows<bf16 const>, Rows<bf16>, cudaStream_t);
template void Kernels::finish(FinishRows<float, float> const&, cudaStream_t);
template void Kernels::finish(FinishRows<bf16, bf16> const&, cudaStream_t);
