// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_grid_kernels.cu: the kernels of the blocks of runner_grid_ranks.hpp besides those of their exchanges and experts,
// and what exchanges call that carry logits (runner_grid_test.cpp).
#include "moe/backends/collective/device/allgather_reduce_scatter.cuh"
#include "moe/backends/collective/device/naive.cuh"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/comm/nccl.hpp"
#include "moe/core/contract/monolithic.hpp"
#include "moe/experts/monolithic.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/row_kernels.cuh"

using moe::comm::Nccl;
using moe::quantization::None;
using Layer = moe::models::RuntimeLayer<moe::bf16, moe::bf16>;

template class moe::backends::detail::LocalExchange<moe::space::cuda, moe::LogitsRows<Layer>, None, float>;
template class moe::detail::GatherExchange<moe::backends::AllGatherReduceScatter<Nccl>, moe::LogitsRows<Layer>, None, float>;
template class moe::detail::GatherExchange<moe::backends::Naive<Nccl>, moe::LogitsRows<Layer>, None, float>;
template void moe::routing::pass_logits<float>(RouteArgs<float> const&, Stream<space::cuda>);

namespace moe::runner {

template class Linear<space::cuda, float, bf16, float>;
template class Linear<space::cuda, bf16, bf16, bf16>;
template class device::DenseShared<bf16>;
template void RowKernels<space::cuda>::rms_norm(Rows<bf16 const>, float const*, float, float, Rows<bf16>, cudaStream_t);
template void RowKernels<space::cuda>::copy_columns(Rows<bf16 const>, Rows<bf16>, cudaStream_t);
template void RowKernels<space::cuda>::finish(FinishRows<bf16, bf16> const&, cudaStream_t);

}  // namespace moe::runner
