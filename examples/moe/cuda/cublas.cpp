// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/cublas.cpp: the experts through cuBLAS.
#include "examples/moe/cuda/run_device.hpp"

template moe_tool::JobResult moe_tool::run_device<moe::quantization::None, moe::experts::CublasGrouped>(Job const&);
