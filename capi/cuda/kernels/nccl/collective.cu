// SPDX-License-Identifier: Apache-2.0
// capi/cuda/kernels/nccl/collective.cu: the kernels of the exchanges over NCCL in layers with run-time dimensions.
#include "moe/backends/collective/device/all_to_all_v.cuh"
#include "moe/backends/collective/device/gather_exchange.cuh"
#include "moe/comm/nccl.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/none.hpp"

using Wide = moe::models::RuntimeLayer<float, float>;
using Narrow = moe::models::RuntimeLayer<moe::bf16, moe::bf16>;
using Half = moe::models::RuntimeLayer<moe::f16, moe::f16>;
using None = moe::quantization::None;
using Fp8 = moe::quantization::Fp8Block<>;
using Int4Group32 = moe::quantization::WNa16<4, 32>;
using Int4Group64 = moe::quantization::WNa16<4, 64>;
using moe::comm::Nccl;
using Gather = moe::backends::AllGatherReduceScatter<Nccl>;
using Naive = moe::backends::Naive<Nccl>;

template class moe::detail::DeviceRounds<Nccl>;
template class moe::backends::detail::AllToAllVExchange<Nccl, Wide, None, float>;
template class moe::backends::detail::AllToAllVExchange<Nccl, Narrow, None, moe::bf16>;
template class moe::backends::detail::AllToAllVExchange<Nccl, Half, None, moe::f16>;
template class moe::backends::detail::AllToAllVExchange<Nccl, Narrow, Fp8, moe::bf16>;
template class moe::backends::detail::AllToAllVExchange<Nccl, Narrow, moe::quantization::Fp8PerToken<>, moe::bf16>;
template class moe::backends::detail::AllToAllVExchange<Nccl, Narrow, Int4Group32, moe::bf16>;
template class moe::backends::detail::AllToAllVExchange<Nccl, Narrow, Int4Group64, moe::bf16>;
template class moe::backends::detail::AllToAllVExchange<Nccl, Narrow, moe::quantization::Int4Group128, moe::bf16>;
template class moe::backends::detail::AllToAllVExchange<Nccl, Narrow, moe::quantization::Mxfp4W4A16<>, moe::bf16>;
template class moe::detail::GatherExchange<Gather, Wide, None, float>;
template class moe::detail::GatherExchange<Gather, Narrow, None, moe::bf16>;
template class moe::detail::GatherExchange<Gather, Narrow, Fp8, moe::bf16>;
template class moe::detail::GatherExchange<Naive, Wide, None, float>;
template class moe::detail::GatherExchange<Naive, Narrow, None, moe::bf16>;
template class moe::detail::GatherExchange<Naive, Narrow, Fp8, moe::bf16>;
