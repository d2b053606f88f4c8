// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/block_kernels.cu: the kernels of what surrounds a layer in a block on the device: gates, projections, shared experts,
// norms, the sum at the end. Rows are float32 or bf16.
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/linear.cuh"
#include "moe/runner/device/row_kernels.cuh"

using moe::bf16;
using moe::Rows;
using moe::runner::FinishRows;
using Cuda = moe::space::cuda;
using Kernels = moe::runner::RowKernels<Cuda>;

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
