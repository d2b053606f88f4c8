// SPDX-License-Identifier: Apache-2.0
// capi/cuda/kernels/nccl/windows.cu: the kernel that finds the peers of NCCL's windows, and the device oracle for rows received over one.
#include "moe/comm/nccl_symmetric.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/none.hpp"

using Layer = moe::models::RuntimeLayer<moe::bf16, moe::bf16>;
using None = moe::quantization::None;

template class moe::experts::CudaReference::Kernel<Layer, None, moe::ActivationFormat::batched>;

namespace moe::comm::detail {
/// Emits resolve_peers() for the files that g++ compiles.
[[gnu::used]] static auto* const kResolvePeers = &resolve_peers;
}  // namespace moe::comm::detail
