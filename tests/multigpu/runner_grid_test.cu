// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_grid_test.cu: the kernels that the runners of runner_grid_test.cpp call, besides those of the window exchanges.
// moe-ranks: 2 4
#include "moe/core/contract/monolithic.hpp"
#include "moe/experts/monolithic.cuh"
#include "runner_grid_kernels.cuh"

using moe::comm::Nccl;
using moe::quantization::None;
using Layer = moe::models::RuntimeLayer<moe::bf16, moe::bf16>;

template class moe::backends::detail::LocalExchange<moe::space::cuda, moe::LogitsRows<Layer>, None, float>;
template class moe::detail::GatherExchange<moe::backends::AllGatherReduceScatter<Nccl>, moe::LogitsRows<Layer>, None, float>;
template void moe::routing::pass_logits<float>(RouteArgs<float> const&, Stream<space::cuda>);
