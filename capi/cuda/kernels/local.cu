// SPDX-License-Identifier: Apache-2.0
// capi/cuda/kernels/local.cu: the kernels that quantise and round the rows of layers with run-time dimensions on one rank.
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_channel.hpp"
#include "moe/quantization/fp8_per_tensor.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int4_fp8.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/int8_per_channel.hpp"
#include "moe/quantization/int8_per_token.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"
#include "moe/quantization/mxfp8.hpp"
#include "moe/quantization/none.hpp"
#include "moe/quantization/nvfp4.hpp"

using Wide = moe::models::RuntimeLayer<float, float>;
using Narrow = moe::models::RuntimeLayer<moe::bf16, moe::bf16>;
using Half = moe::models::RuntimeLayer<moe::f16, moe::f16>;
namespace quantization = moe::quantization;

template class moe::backends::detail::LocalExchange<moe::space::cuda, Wide, quantization::None, float>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::None, float>;  // cuda_reference's sums
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::None, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Half, quantization::None, float>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Half, quantization::None, moe::f16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::WNa16<4, 32>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::WNa16<4, 64>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Int4Group128, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::WNa16<4, 32, true>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::WNa16<4, 64, true>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Int4Group128Zero, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Mxfp4W4A16<>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Mxfp4Fp8<>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Int4Fp8<32>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Int4Fp8<64>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Int4Fp8<128>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Int4Fp8<32, true>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Int4Fp8<64, true>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Int4Fp8<128, true>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Nvfp4W4A16, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Fp8PerTensor<>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Fp8PerToken<>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Fp8Block<>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Int8PerToken, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Int8PerChannel, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Fp8PerChannel<>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Mxfp8W8A16<>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Mxfp8<>, moe::bf16>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Fp8PerToken<>, float>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Fp8Block<>, float>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::WNa16<4, 32>, float>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::WNa16<4, 64>, float>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Int4Group128, float>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Mxfp4W4A16<>, float>;
template class moe::backends::detail::LocalExchange<moe::space::cuda, Narrow, quantization::Mxfp8<>, float>;
