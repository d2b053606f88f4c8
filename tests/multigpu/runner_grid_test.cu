// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_grid_test.cu: the kernels that the runners of runner_grid_test.cpp call, besides those of the window exchanges.
// moe-ranks: 2 4
#include "moe/backends/collective/all_to_all_v.cuh"
#include "moe/backends/collective/allgather_reduce_scatter.cuh"
#include "moe/backends/collective/no_expert_parallel.cuh"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/core/contract/monolithic.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/monolithic.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/row_kernels.cuh"

using moe::bf16;
using moe::Rows;
using moe::comm::Nccl;
using moe::quantization::None;
using Cuda = moe::space::cuda;
using Layer = moe::models::RuntimeLayer<bf16, bf16>;
using Kernels = moe::runner::RowKernels<Cuda>;

template void moe::routing::RowRouter<moe::routing::RouterConfig>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template class moe::detail::DeviceRounds<Nccl>;
template class moe::backends::detail::LocalExchange<Cuda, Layer, None, float>;
template class moe::backends::detail::AllToAllVExchange<Nccl, Layer, None, float>;
template class moe::detail::GatherExchange<moe::backends::AllGatherReduceScatter<Nccl>, Layer, None, float>;
template class moe::backends::detail::LocalExchange<Cuda, moe::LogitsRows<Layer>, None, float>;
template class moe::detail::GatherExchange<moe::backends::AllGatherReduceScatter<Nccl>, moe::LogitsRows<Layer>, None, float>;
template void moe::routing::pass_logits<float>(RouteArgs<float> const&, Stream<space::cuda>);
template class moe::experts::CudaReference::Kernel<Layer, None, moe::ActivationFormat::standard>;
template class moe::experts::CudaReference::Kernel<Layer, None, moe::ActivationFormat::batched>;

template class moe::runner::Linear<Cuda, float, bf16, float>;
template class moe::runner::Linear<Cuda, bf16, bf16, bf16>;
template class moe::runner::device::DenseShared<bf16>;
template void Kernels::rms_norm(Rows<bf16 const>, float const*, float, float, Rows<bf16>, cudaStream_t);
template void Kernels::copy_columns(Rows<bf16 const>, Rows<bf16>, cudaStream_t);
template void Kernels::finish(moe::runner::FinishRows<bf16, bf16> const&, cudaStream_t);

/// Emits resolve_peers() for the file that g++ compiles.
[[gnu::used]] static auto* const kResolvePeers = &moe::comm::detail::resolve_peers;
