// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/reference.cpp: the device oracle without quantisation.
#include "examples/moe/cuda/run_device.hpp"

template moe_tool::JobResult moe_tool::run_device<moe::quantization::None, moe::experts::CudaReference>(Job const&);
