// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/device_backends.cu: instantiates what layers of run-time dimensions with CudaReference call over the backends of
// registry_backends.hpp. The kernels of the exchanges over windows are in the library moe_exchange_kernels.
#include "moe/backends/collective/device/all_to_all_v.cuh"
#include "moe/backends/collective/device/allgather_reduce_scatter.cuh"
#include "moe/backends/collective/device/naive.cuh"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"

namespace moe {

template void routing::RowRouter<routing::RouterConfig>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template class detail::DeviceRounds<comm::Nccl>;
template class backends::detail::LocalExchange<space::cuda, models::RuntimeLayer<bf16, bf16>, quantization::None, float>;
template class backends::detail::AllToAllVExchange<comm::Nccl, models::RuntimeLayer<bf16, bf16>, quantization::None, float>;
template class detail::GatherExchange<backends::AllGatherReduceScatter<comm::Nccl>, models::RuntimeLayer<bf16, bf16>, quantization::None,
                                      float>;
template class detail::GatherExchange<backends::Naive<comm::Nccl>, models::RuntimeLayer<bf16, bf16>, quantization::None, float>;
template class experts::CudaReference::Kernel<models::RuntimeLayer<bf16, bf16>, quantization::None, ActivationFormat::standard>;
template class experts::CudaReference::Kernel<models::RuntimeLayer<bf16, bf16>, quantization::None, ActivationFormat::batched>;

}  // namespace moe

/// Emits resolve_peers() for the files that g++ compiles.
[[gnu::used]] static auto* const kResolvePeers = &moe::comm::detail::resolve_peers;
