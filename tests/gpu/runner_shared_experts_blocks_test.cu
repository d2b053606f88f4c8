// SPDX-License-Identifier: Apache-2.0
// tests/gpu/runner_shared_experts_blocks_test.cu: the kernels that the blocks of runner_shared_experts_blocks_test.cpp call, besides those
// of the Hopper experts.
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/row_kernels.cuh"

using Layer = moe::models::RuntimeLayer<moe::bf16, moe::bf16>;
using moe::bf16;
using moe::Rows;
using Cuda = moe::space::cuda;
using Kernels = moe::runner::RowKernels<Cuda>;
using Fp8 = moe::quantization::Fp8Block<>;
using Mxfp4Fp8 = moe::quantization::Mxfp4Fp8<>;

template void moe::routing::RowRouter<moe::routing::RouterConfig>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template class moe::backends::detail::LocalExchange<Cuda, Layer, Fp8, bf16>;
template class moe::backends::detail::LocalExchange<Cuda, Layer, moe::quantization::Int4Group128, bf16>;
template class moe::backends::detail::LocalExchange<Cuda, Layer, moe::quantization::WNa16<4, 32>, bf16>;
template class moe::backends::detail::LocalExchange<Cuda, Layer, moe::quantization::Nvfp4W4A16, bf16>;
template class moe::backends::detail::LocalExchange<Cuda, Layer, Mxfp4Fp8, bf16>;

template class moe::runner::Linear<Cuda, float, float, float>;
template class moe::runner::Linear<Cuda, float, bf16, float>;
template class moe::runner::Linear<Cuda, bf16, bf16, bf16>;
template class moe::runner::device::DenseShared<bf16>;

template void Kernels::gelu(Rows<float>, cudaStream_t);
template void Kernels::rms_norm(Rows<float const>, float const*, float, float, Rows<float>, cudaStream_t);
template void Kernels::rms_norm(Rows<bf16 const>, float const*, float, float, Rows<float>, cudaStream_t);
template void Kernels::rms_norm(Rows<bf16 const>, float const*, float, float, Rows<bf16>, cudaStream_t);
template void Kernels::quantize(Fp8 const&, Rows<bf16 const>, Rows<Fp8::Payload<bf16>>, Rows<float>, cudaStream_t);
template void Kernels::quantize(Mxfp4Fp8 const&, Rows<bf16 const>, Rows<Mxfp4Fp8::Payload<bf16>>, Rows<float>, cudaStream_t);
template void Kernels::sigmoid_gate(Rows<bf16 const>, float const*, Rows<float>, cudaStream_t);
template void Kernels::copy_columns(Rows<bf16 const>, Rows<bf16>, cudaStream_t);
template void Kernels::finish(moe::runner::FinishRows<bf16, bf16> const&, cudaStream_t);
