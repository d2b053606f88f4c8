// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/block_kernels.cuh: the kernels around a layer in a DeviceBlock: gates, projections, shared experts, norms, the sum
// at the end. Rows are float32 or bf16. Include it in exactly one .cu of a program.
#pragma once

#include "moe/core/space.hpp"
#include "moe/core/types.hpp"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/linear.cuh"
#include "moe/runner/device/row_kernels.cuh"

namespace moe::runner {

using CudaRowKernels = RowKernels<space::cuda>;

template class Linear<space::cuda, float, float, float>;
template class Linear<space::cuda, float, bf16, float>;
template class Linear<space::cuda, bf16, bf16, bf16>;
template class device::DenseShared<float>;
template class device::DenseShared<bf16>;

template void CudaRowKernels::gelu(Rows<float>, cudaStream_t);
template void CudaRowKernels::rms_norm(Rows<float const>, float const*, float, float, Rows<float>, cudaStream_t);
template void CudaRowKernels::rms_norm(Rows<bf16 const>, float const*, float, float, Rows<float>, cudaStream_t);
template void CudaRowKernels::rms_norm(Rows<bf16 const>, float const*, float, float, Rows<bf16>, cudaStream_t);
template void CudaRowKernels::copy_columns(Rows<float const>, Rows<float>, cudaStream_t);
template void CudaRowKernels::copy_columns(Rows<bf16 const>, Rows<bf16>, cudaStream_t);
template void CudaRowKernels::finish(FinishRows<float, float> const&, cudaStream_t);
template void CudaRowKernels::finish(FinishRows<bf16, bf16> const&, cudaStream_t);

}  // namespace moe::runner
