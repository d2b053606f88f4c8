// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_grid_kernels.cuh: the kernels of the blocks of runner_grid_ranks.hpp, for the translation unit that instantiates
// them.
#pragma once

#include "device_backends.cuh"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/row_kernels.cuh"

namespace moe::runner {

template class Linear<space::cuda, float, bf16, float>;
template class Linear<space::cuda, bf16, bf16, bf16>;
template class device::DenseShared<bf16>;
template void RowKernels<space::cuda>::rms_norm(Rows<bf16 const>, float const*, float, float, Rows<bf16>, cudaStream_t);
template void RowKernels<space::cuda>::copy_columns(Rows<bf16 const>, Rows<bf16>, cudaStream_t);
template void RowKernels<space::cuda>::finish(FinishRows<bf16, bf16> const&, cudaStream_t);

}  // namespace moe::runner
