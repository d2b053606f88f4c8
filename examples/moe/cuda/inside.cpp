// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/inside.cpp: the device oracle that routes inside, without quantisation.
#include "examples/moe/cuda/run_device.hpp"

template moe_tool::JobResult moe_tool::run_device<moe::quantization::None, moe::experts::Monolithic<moe::experts::CudaReference>>(
    Job const&);
