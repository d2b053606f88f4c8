// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/nccl/windows_reference_standard.cpp: the device oracle over windows between GPUs, standard format.
#include "examples/moe/cuda/nccl/run_over_nccl_window.hpp"

template moe_tool::JobResult
moe_tool::run_over_nccl_window<moe::quantization::None, moe::experts::CudaReference, moe::ActivationFormat::standard>(Job const&);
