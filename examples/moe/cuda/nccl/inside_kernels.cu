// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/nccl/inside_kernels.cu: the kernels that gather rows with their logits.
#include "moe/backends/collective/device/gather_exchange.cuh"
#include "moe/comm/nccl.hpp"
#include "moe/core/contract/monolithic.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/none.hpp"

using Layer = moe::LogitsRows<moe::models::RuntimeLayer<float, float>>;
using moe::comm::Nccl;
using moe::quantization::None;

template class moe::detail::GatherExchange<moe::backends::AllGatherReduceScatter<Nccl>, Layer, None, float>;
template class moe::detail::GatherExchange<moe::backends::Naive<Nccl>, Layer, None, float>;
