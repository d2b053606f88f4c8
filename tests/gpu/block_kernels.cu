// SPDX-License-Identifier: Apache-2.0
// tests/gpu/block_kernels.cu: the kernels that the tests *_blocks_test.cpp call, besides those of the Hopper experts. Those around a layer
// are the tool's (examples/moe/cuda/block_kernels.cuh).
#include "batched_exchange.cuh"
#include "examples/moe/cuda/block_kernels.cuh"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/experts/cublas_grouped.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/schemes.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"

using Wide = moe::models::RuntimeLayer<float, float>;
using Narrow = moe::models::RuntimeLayer<moe::bf16, moe::bf16>;
using moe::bf16;
using moe::Rows;
using moe::experts::CublasGrouped;
using moe::experts::CudaReference;
using Cuda = moe::space::cuda;
using Kernels = moe::runner::RowKernels<Cuda>;
namespace quantization = moe::quantization;
using quantization::None;

template void moe::routing::RowRouter<moe::routing::RouterConfig>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;

template class moe::backends::detail::LocalExchange<Cuda, Wide, None, float>;
template class CublasGrouped::Kernel<Wide, None, moe::ActivationFormat::standard>;
template class CudaReference::Kernel<Wide, None, moe::ActivationFormat::standard>;
template class CublasGrouped::Kernel<Narrow, None, moe::ActivationFormat::standard>;
template class moe_test::BatchedExchange<Narrow, None, bf16>;
template class moe_test::BatchedExchange<Narrow, None, float>;
template class CudaReference::Kernel<Narrow, None, moe::ActivationFormat::batched>;

#define MOE_TEST_SCHEME(...)                                                             \
  template class moe::backends::detail::LocalExchange<Cuda, Narrow, __VA_ARGS__, bf16>;  \
  template class moe::backends::detail::LocalExchange<Cuda, Narrow, __VA_ARGS__, float>; \
  template class CudaReference::Kernel<Narrow, __VA_ARGS__, moe::ActivationFormat::standard>
MOE_TEST_SCHEME(None);
MOE_TEST_SCHEME(quantization::Fp8PerTensor<>);
MOE_TEST_SCHEME(quantization::Fp8PerToken<>);
MOE_TEST_SCHEME(quantization::Fp8Block<>);
MOE_TEST_SCHEME(quantization::Int8PerChannel);
MOE_TEST_SCHEME(quantization::Int4Group128);
MOE_TEST_SCHEME(quantization::WNa16<4, 32>);
MOE_TEST_SCHEME(quantization::Nvfp4W4A16);
MOE_TEST_SCHEME(quantization::Mxfp4W4A16<>);
MOE_TEST_SCHEME(quantization::Mxfp4Fp8<>);
MOE_TEST_SCHEME(quantization::Int4Fp8<128>);
MOE_TEST_SCHEME(quantization::Int4Fp8<32>);

/// Schemes whose oracle is the host: rows alone.
#define MOE_TEST_ROWS(...) template class moe::backends::detail::LocalExchange<Cuda, Narrow, __VA_ARGS__, bf16>
#define MOE_TEST_BATCHES(...) template class moe_test::BatchedExchange<Narrow, __VA_ARGS__, bf16>
MOE_TEST_ROWS(quantization::WNa16<4, 32, true>);
MOE_TEST_ROWS(quantization::WNa16<4, 64, true>);
MOE_TEST_ROWS(quantization::WNa16<4, 128, true>);
MOE_TEST_ROWS(quantization::WNa16<4, 64>);
MOE_TEST_ROWS(quantization::Int4Fp8<32, true>);
MOE_TEST_ROWS(quantization::Int4Fp8<64, true>);
MOE_TEST_ROWS(quantization::Int4Fp8<128, true>);
MOE_TEST_ROWS(quantization::Int4Fp8<64>);
MOE_TEST_ROWS(quantization::Fp8PerChannel<>);
MOE_TEST_ROWS(quantization::Mxfp8W8A16<>);
MOE_TEST_ROWS(quantization::Int8PerToken);
MOE_TEST_ROWS(quantization::Mxfp8<>);
MOE_TEST_ROWS(quantization::Mxfp4<>);
MOE_TEST_ROWS(quantization::Mxfp4W4A8<>);
MOE_TEST_ROWS(quantization::Nvfp4);
MOE_TEST_ROWS(quantization::W4A8Fp8);
MOE_TEST_ROWS(quantization::W4A8<quantization::Fp8Codec<>, 32>);
MOE_TEST_ROWS(quantization::W4A8Int8);
MOE_TEST_BATCHES(quantization::WNa16<4, 32, true>);
MOE_TEST_BATCHES(quantization::Nvfp4W4A16);
MOE_TEST_BATCHES(quantization::Mxfp8W8A16<>);
MOE_TEST_BATCHES(quantization::Int4Fp8<64, true>);
MOE_TEST_BATCHES(quantization::Mxfp4Fp8<>);
MOE_TEST_BATCHES(quantization::Mxfp8<>);
MOE_TEST_BATCHES(quantization::W4A8Int8);

/// Rows of shared experts in the layer's scheme.
template <class Quant>
using Codes = typename Quant::template Payload<bf16>;
template void Kernels::quantize(quantization::Fp8Block<> const&, Rows<bf16 const>, Rows<Codes<quantization::Fp8Block<>>>, Rows<float>,
                                cudaStream_t);
template void Kernels::quantize(quantization::Fp8PerToken<> const&, Rows<bf16 const>, Rows<Codes<quantization::Fp8PerToken<>>>, Rows<float>,
                                cudaStream_t);
template void Kernels::quantize(quantization::Mxfp4Fp8<> const&, Rows<bf16 const>, Rows<Codes<quantization::Mxfp4Fp8<>>>, Rows<float>,
                                cudaStream_t);
template void Kernels::quantize(quantization::Int4Fp8<128> const&, Rows<bf16 const>, Rows<Codes<quantization::Int4Fp8<128>>>, Rows<float>,
                                cudaStream_t);
template void Kernels::quantize(quantization::Int4Fp8<32> const&, Rows<bf16 const>, Rows<Codes<quantization::Int4Fp8<32>>>, Rows<float>,
                                cudaStream_t);
template void Kernels::sigmoid_gate(Rows<bf16 const>, float const*, Rows<float>, cudaStream_t);
